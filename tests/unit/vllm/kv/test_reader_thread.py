from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import pytest

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.vllm.kv.agents import Read, ReaderThread

PATIENCE_S = 30.0


@dataclass
class FakeAgent:
    """NIXL's, of which a test lets every call go on."""

    answers: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    """Answers to `transfer`, then to `check_xfer_state`: a state, or what is raised."""
    posting: SimpleQueue[tuple[Any, ...]] = field(default_factory=SimpleQueue)
    released: list[Any] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    name: str = "agent"

    def make_prepped_xfer(self, *blocks: Any) -> tuple[Any, ...]:
        return blocks

    def transfer(self, handle: tuple[Any, ...]) -> Any:
        self.posting.put(handle)
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: tuple[Any, ...]) -> Any:
        self.threads.add(threading.current_thread().name)
        answer = self.answers.get(timeout=PATIENCE_S)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def release_xfer_handle(self, handle: tuple[Any, ...]) -> None:
        self.released.append(handle)


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent()


@pytest.fixture
def prepared() -> list[str]:
    return []


@pytest.fixture
def reader(agent: FakeAgent, prepared: list[str]) -> Iterator[ReaderThread]:
    reader = ReaderThread(agent, lambda: prepared.append(threading.current_thread().name))
    yield reader
    reader.close()


def until(reader: ReaderThread, condition: Callable[[], bool]) -> None:
    for _ in range(100):
        if condition():
            return
        reader.wait(PATIENCE_S / 100)
    pytest.fail("nothing has come of it")


def start(reader: ReaderThread, *blocks: int) -> Read:
    read = reader.make_prepped_xfer("READ", 1, [*blocks], 2, [*blocks], notif_msg=b"for nobody")
    assert reader.transfer(read) == "PROC"
    return read


def test_a_read_is_posted_and_looked_after_in_a_thread_of_its_own(
    reader: ReaderThread, agent: FakeAgent, prepared: list[str]
) -> None:
    read = start(reader, 5)
    assert agent.posting.get(timeout=PATIENCE_S) == ("READ", 1, [5], 2, [5])
    assert reader.check_xfer_state(read) == "PROC"
    for answer in ("PROC", "PROC", "DONE"):
        agent.answers.put(answer)
    until(reader, lambda: reader.check_xfer_state(read) == "DONE")
    reader.release_xfer_handle(read)
    assert agent.released == [("READ", 1, [5], 2, [5])]
    assert agent.threads == {*prepared} == {"reader"}
    assert reader.name == "agent"


@pytest.mark.parametrize("answers", [[OSError("gone")], ["PROC", OSError("gone")], ["ERR"], ["PROC", "ERR"]])
def test_a_read_that_fails_says_so_and_is_left_to_be_released(
    reader: ReaderThread, agent: FakeAgent, answers: list[Any]
) -> None:
    failing = start(reader, 5)
    for answer in answers:
        agent.answers.put(answer)
    until(reader, lambda: failing.error is not None)
    with pytest.raises((OSError, EngineError)):
        reader.check_xfer_state(failing)
    assert agent.released == []
    reader.release_xfer_handle(failing)
    assert agent.released == [("READ", 1, [5], 2, [5])]
    # The thread goes on.
    other = start(reader, 6)
    agent.answers.put("DONE")
    until(reader, lambda: reader.check_xfer_state(other) == "DONE")


def test_what_is_given_up_in_time_is_not_posted(reader: ReaderThread, agent: FakeAgent) -> None:
    first, second, third = start(reader, 1), start(reader, 2), start(reader, 3)
    agent.posting.get(timeout=PATIENCE_S)
    # The first one is being copied, and is copied to its end.
    reader.give_up([first, second])
    agent.answers.put("DONE")
    agent.answers.put("DONE")
    until(reader, lambda: all(read.done for read in (first, second, third)))
    assert agent.posting.get(timeout=PATIENCE_S) == ("READ", 1, [3], 2, [3])
    assert agent.posting.empty()


def test_the_end_waits_for_what_is_being_copied_and_for_nothing_else(reader: ReaderThread, agent: FakeAgent) -> None:
    reader.close()
    other = ReaderThread(agent, lambda: None)
    first, second = start(other, 1), start(other, 2)
    agent.posting.get(timeout=PATIENCE_S)
    threading.Timer(0.05, agent.answers.put, ["DONE"]).start()
    other.close()
    assert (first.done, second.done) == (True, False)
    assert agent.posting.empty()
