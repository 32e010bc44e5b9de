"""A process on a leash, and what launcher and forkserver say to each other. With real processes and sockets."""

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
from dynamo_local.process.forkserver.exit_pipe import ExitPipe, write_exit_code

ON_A_LEASH = """
import sys, time
from dynamo_local.process.death_pipe import die_with_writer
die_with_writer(int(sys.argv[1]))
print("on", flush=True)
time.sleep(600)
"""


def on_a_leash(leash: ExitPipe) -> subprocess.Popen[bytes]:
    collar = leash.childs[0]
    command = [sys.executable, "-c", ON_A_LEASH, str(collar)]
    child = subprocess.Popen(command, pass_fds=[collar], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
    leash.give_away()
    return child


def test_letting_go_kills_at_once() -> None:
    leash = ExitPipe.make()
    with on_a_leash(leash) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"on\n"
        assert child.poll() is None
        os.close(leash.held)
        assert child.wait(30) == -signal.SIGKILL
    os.close(leash.word)


def test_one_that_was_let_go_before_it_put_the_leash_on_ends() -> None:
    leash = ExitPipe.make()
    os.close(leash.held)
    with on_a_leash(leash) as child:
        # By itself or by the kernel: the two come at the same time.
        assert child.wait(30) in (1, -signal.SIGKILL)
    os.close(leash.word)


@pytest.mark.parametrize("code", [0, 1, 255])
def test_the_last_word_is_the_exit_code(code: int) -> None:
    leash = ExitPipe.make()
    assert leash.last_word() is None
    write_exit_code(leash.childs[1], code)
    assert leash.last_word() == code
    leash.give_away()
    assert leash.last_word() is None
    os.close(leash.held)
    os.close(leash.word)


def test_messages_and_descriptors_arrive_through_a_socket_whose_path_is_long(tmp_path: Path) -> None:
    path = tmp_path / ("d" * 120) / "here.sock"
    path.parent.mkdir()
    order = protocol.Order(("--service", "W"), {b"A": b"\xff", b"LONG": b"x" * 500_000}, "/somewhere")
    with protocol.listen(path) as listener, protocol.connect(path) as launcher:
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
        assert received == order
        os.write(kept, b"through")
        assert [os.read(descriptor, 7) for descriptor in descriptors] == [b"through"]
        protocol.close([kept, *descriptors])


@pytest.mark.parametrize(
    "data",
    [b"\0\0\0\4hello", (protocol.MAX_BYTES + 1).to_bytes(4, "big"), b"\0\0\0\1\xc1"],
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
