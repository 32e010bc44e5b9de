"""A process tied to its launcher by an exit pipe, and the protocol of launcher and fork server. With real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_local.core.errors import DecodeError
from dynamo_local.process.forkserver import protocol
from dynamo_local.process.forkserver.protocol import ExitPipe, write_exit_code

TIED = """
import sys, time
from dynamo_local.process.ancestry import die_with_writer
die_with_writer(int(sys.argv[1]))
print("on", flush=True)
time.sleep(600)
"""


def tied(exit_pipe: ExitPipe) -> subprocess.Popen[bytes]:
    death_pipe = exit_pipe.for_child[0]
    command = [sys.executable, "-c", TIED, str(death_pipe)]
    child = subprocess.Popen(command, pass_fds=[death_pipe], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
    exit_pipe.close_childs()
    return child


def test_closing_the_death_pipe_kills_the_child_at_once() -> None:
    exit_pipe = ExitPipe.make()
    with tied(exit_pipe) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"on\n"
        assert child.poll() is None
        os.close(exit_pipe.death_pipe)
        assert child.wait(30) == -signal.SIGKILL
    os.close(exit_pipe.exit_code)


def test_a_child_whose_death_pipe_was_closed_before_it_was_tied_ends() -> None:
    exit_pipe = ExitPipe.make()
    os.close(exit_pipe.death_pipe)
    with tied(exit_pipe) as child:
        # The child ends by itself, or the kernel kills it: both come at the same time.
        assert child.wait(30) in (1, -signal.SIGKILL)
    os.close(exit_pipe.exit_code)


@pytest.mark.parametrize("code", [0, 1, 255])
def test_the_exit_code_is_read_once(code: int) -> None:
    exit_pipe = ExitPipe.make()
    assert exit_pipe.read_exit_code() is None
    write_exit_code(exit_pipe.for_child[1], code)
    assert exit_pipe.read_exit_code() == code
    exit_pipe.close_childs()
    assert exit_pipe.read_exit_code() is None
    os.close(exit_pipe.death_pipe)
    os.close(exit_pipe.exit_code)


def test_messages_and_descriptors_arrive_through_a_socket_whose_path_is_long(tmp_path: Path) -> None:
    path = tmp_path / ("d" * 120) / "here.sock"
    path.parent.mkdir()
    order = protocol.Order(("--service", "W"), {b"A": b"\xff", b"LONG": b"x" * 500_000}, "/somewhere")
    with protocol.listen(str(path)) as listener, protocol.connect(str(path)) as launcher:
        forkserver, _ = listener.accept()
        sent, kept = os.pipe()
        child = os.fork()
        if child == 0:
            # The message is larger than the sockets' buffers: somebody must read while it is sent.
            protocol.send(launcher, order, (sent,))
            os._exit(0)
        os.close(sent)
        with forkserver:
            received, descriptors = protocol.receive(forkserver, protocol.Order, protocol.FORKED_DESCRIPTORS)
        os.waitpid(child, 0)
        assert vars(received) == vars(order)
        os.write(kept, b"through")
        assert [os.read(descriptor, 7) for descriptor in descriptors] == [b"through"]
        protocol.close([kept, *descriptors])


@pytest.mark.parametrize(
    "data",
    [b"\0\0\0\4hello", (protocol.MAX_BYTES + 1).to_bytes(4, "big"), b"\0\0\0\3\xc1\0a"],
    ids=["kind", "size", "bytes"],
)
def test_garbage_is_a_decode_error(data: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(data)
        with pytest.raises(DecodeError):
            protocol.receive(here, protocol.Answer, 1)


def test_silence_is_an_error_of_the_system() -> None:
    here, there = socket.socketpair()
    with here:
        there.close()
        with pytest.raises(ConnectionResetError):
            protocol.receive(here, protocol.Answer, 1)
