"""Servers in two namespaces and two state folders, with real circus and real NATS: no device ever has two holders."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.server_process import PATIENCE_S, ServerProcess, eventually

pytestmark = pytest.mark.integration

COMMAND = [sys.executable, "-m", "dynamo_local.cli.main"]


@dataclass(frozen=True)
class Machine:
    """A machine with GPUs that no other test has."""

    root: Path
    gpus: tuple[str, ...]

    def serve(self, namespace: str) -> DeviceServer:
        return DeviceServer(self.root / namespace, namespace, *self.gpus)

    def violations(self) -> str:
        found = self.root / "witnesses" / "violations"
        return found.read_text() if found.exists() else ""


class DeviceServer(ServerProcess):
    """A server with one worker at first."""

    def __init__(self, root: Path, namespace: str, *gpus: str) -> None:
        super().__init__(root, namespace, ["-m", "tests.integration.supervisor.serve_devices", namespace, *gpus])

    def ready(self) -> DeviceServer:
        self.await_start()
        return self

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, *arguments, f"--namespace={self.paths.namespace}"],
            env=dict(self.environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def command(self, *arguments: str) -> tuple[int, str]:
        with self.begin(*arguments) as process:
            out, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, out

    def devices(self) -> set[int]:
        return {device for component in self.state().components.values() for device in component.devices}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    (tmp_path / "witnesses").mkdir()
    monkeypatch.setenv("WITNESSES", str(tmp_path / "witnesses"))
    machine = Machine(tmp_path, tuple(f"GPU-{secrets.token_hex(8)}" for _ in range(3)))
    yield machine
    assert machine.violations() == ""


def test_a_device_never_has_two_holders(machine: Machine) -> None:
    # Both want the first one.
    with machine.serve("one") as one, machine.serve("two") as two:
        one.ready()
        two.ready()
        assert one.devices() | two.devices() == {0, 1}
        who = f"is held by the server of namespace one (pid {one.process.pid}, user "
        (of_one,) = one.devices()
        assert f"GPU {of_one} {who}" in two.command("ps")[1]
        # One is left, and both want it.
        scaling = [server.begin("scale", "Holder=2") for server in (one, two)]
        said = [process.communicate(timeout=PATIENCE_S)[0] for process in scaling]
        assert sorted(process.returncode != 0 for process in scaling) == [False, True], said
        assert (one.devices() | two.devices(), one.devices() & two.devices()) == ({0, 1, 2}, set())
        # A server that dies leaves its devices once the last process is gone from them.
        one.signal(signal.SIGKILL)
        one.process.wait()

        def all_of_them() -> bool:
            code, out = two.command("scale", "Holder=3")
            assert code == 0 or "is held by a process of a server that has ended" in out, out
            return code == 0

        eventually(all_of_them, "its devices are never free")
        assert two.devices() == {0, 1, 2}
        with machine.serve("one") as again:
            assert again.end() == 2
            assert (
                f"Holder needs 1 device, 0 of 3 GPUs are free; GPU 0 {who.replace('one', 'two')[:40]}" in again.output
            )
        # A worker that dies is started again on its own device, which nobody could take meanwhile.
        killed = two.state().components["two_Holder_1"]
        assert killed.pid is not None
        os.kill(killed.pid, signal.SIGKILL)
        eventually(
            lambda: two.state().components["two_Holder_1"].pid not in (None, killed.pid), "it is not there again"
        )
        assert two.devices() == {0, 1, 2}
        # What is given up is anybody's.
        code, out = two.command("scale", "Holder=1")
        assert code == 0, out
        with machine.serve("one") as again:
            again.ready()
            assert not again.devices() & two.devices()
            for server in (again, two):
                server.signal(signal.SIGTERM)
                assert server.end() == 0, server.output
                server.assert_nothing_left()


def test_two_workers_share_a_device_that_no_other_server_gets(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = "--Holder.ServiceArgs.workers={} --Holder.ServiceArgs.resources.gpu={}"
    monkeypatch.setenv("SERVE_OPTIONS", shares.format(2, 0.5))
    with machine.serve("one") as one:
        one.ready()
        assert {name: c.devices for name, c in one.state().components.items() if c.devices} == {
            "one_Holder": (0,),
            "one_Holder_1": (0,),
        }
        assert "0 (0.5)" in one.command("ps")[1]
        # A third one does not fit there; three devices have room for six.
        assert one.command("scale", "Holder=3")[0] == 0
        assert one.state().components["one_Holder_2"].devices == (1,)
        code, out = one.command("scale", "Holder=7")
        assert (code, "that takes 3.5 devices, and there are 3 GPUs" in out) == (2, True), out
        # One that dies comes back on its share, beside the one that stayed.
        killed = one.state().components["one_Holder"]
        assert killed.pid is not None
        os.kill(killed.pid, signal.SIGKILL)
        eventually(lambda: one.state().components["one_Holder"].pid not in (None, killed.pid), "it is not there again")
        # Others get what nobody here has any part of, also while shares of a device come and go.
        assert one.command("scale", "Holder=1")[0] == 0
        assert one.devices() == {0}
        monkeypatch.setenv("SERVE_OPTIONS", shares.format(3, 1))
        with machine.serve("two") as two:
            assert two.end() == 2
            assert "Holder needs 1 device, 0 of 3 GPUs are free; GPU 0 is held by the server of namespace one" in (
                two.output
            )
        assert one.command("scale", "Holder=2")[0] == 0
        assert one.devices() == {0}
        one.signal(signal.SIGTERM)
        assert one.end() == 0, one.output
        one.assert_nothing_left()
