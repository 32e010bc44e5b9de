from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.mocker.blocks import BlockMemory, read_remote

A, B, ZERO = b"a" * 16, b"b" * 16, bytes(16)

OTHER_PROCESS = """
import sys
from pathlib import Path
from dynamo_local.engine.mocker.blocks import BlockMemory
memory = BlockMemory(4)
memory.share(Path(sys.argv[1]))
memory.write(2, b"x" * 16)
print(memory.path, flush=True)
sys.stdin.read()
"""


def shared(directory: Path, blocks: int = 4) -> BlockMemory:
    memory = BlockMemory(blocks)
    memory.share(directory)
    return memory


def path_of(memory: BlockMemory) -> Path:
    assert memory.path is not None
    return memory.path


def test_a_block_holds_what_was_written_into_it_last() -> None:
    memory = BlockMemory(3)
    memory.write(1, A)
    memory.write(1, B)
    assert memory.read([0, 1, 1]) == [ZERO, B, B]
    assert memory.path is None


def test_a_reader_sees_what_stands_there_now(tmp_path: Path) -> None:
    memory = BlockMemory(4)
    memory.write(0, A)
    memory.share(tmp_path)
    assert read_remote(path_of(memory), [0, 3]) == [A, ZERO]
    memory.write(3, B)
    assert read_remote(path_of(memory), [3, 0]) == [B, A]


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    path = path_of(shared(tmp_path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_closed_memory_leaves_no_file_and_stays_usable(tmp_path: Path) -> None:
    memory = shared(tmp_path)
    path = path_of(memory)
    memory.write(1, A)
    memory.close()
    memory.close()
    assert list(tmp_path.iterdir()) == []
    assert memory.read([1]) == [A]
    with pytest.raises(EngineError, match="cannot be opened"):
        read_remote(path, [1])


def test_blocks_that_are_not_there_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no such blocks"):
        read_remote(path_of(shared(tmp_path)), [4])


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot share"):
        shared(tmp_path / "nowhere")


def test_the_memory_of_a_killed_process_cannot_be_read(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OTHER_PROCESS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert read_remote(path, [2]) == [b"x" * 16]
        process.kill()
        process.wait()
    with pytest.raises(EngineError, match="dead"):
        read_remote(path, [2])
