"""Pins of readers on other machines, which have names that the source gives."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from components.workers import kv_source
from components.workers.kv_source import KvSource
from dynamo_local.core.messages.kv import PinAnswer, PinQuestion
from state.machine.identity import machine_id

NETWORK = "10.1.2.0/24"


class Pins:
    """An engine that keeps pins."""

    def __init__(self) -> None:
        self.held: set[str] = set()

    async def pin(self, question: PinQuestion) -> PinAnswer:
        self.held.add(question.pin)
        return PinAnswer(1)

    async def unpin(self, pins: Sequence[str]) -> None:
        self.held.difference_update(pins)


class Lender:
    """A worker's source, with its engine."""

    def __init__(self) -> None:
        self.engine = Pins()
        presence = SimpleNamespace(engine=SimpleNamespace(kv_network=NETWORK))
        context: Any = SimpleNamespace(announcer=SimpleNamespace(presence=presence))
        engine: Any = self.engine
        self.source = KvSource(context, engine, lambda: False)

    async def asked(self, pin: str, machine: str = "another") -> str:
        """Have the question answered. Returns the name of the pin."""
        question = PinQuestion(pin, "same", (b"a",), 10.0, machine=machine, network=NETWORK)
        return (await self.source._on_pin(question)).pin


async def test_a_far_reader_without_an_answer_ends_its_pin_by_the_name_in_its_question() -> None:
    lender = Lender()
    other = await lender.asked("other")
    await lender.asked("mine")
    assert len(lender.engine.held) == 2
    await lender.source.unpin(["mine"])
    assert lender.engine.held == {other}


async def test_a_far_reader_ends_what_a_question_got_that_was_delivered_twice() -> None:
    lender = Lender()
    first, second = await lender.asked("mine"), await lender.asked("mine")
    assert lender.engine.held == {first, second}
    await lender.source.unpin([first])
    assert lender.engine.held == set()


async def test_a_reader_of_this_machine_ends_its_pin_by_its_own_name() -> None:
    lender = Lender()
    await lender.asked("mine", machine_id())
    assert lender.engine.held == {"mine"}
    await lender.source.unpin(["mine", "unknown", "unknown.1"])
    assert lender.engine.held == set()


async def test_the_names_of_most_recent_questions_are_kept() -> None:
    lender = Lender()
    for number in range(kv_source._MOST_NAMED + 5):
        await lender.asked(f"p{number}")
    assert len(lender.source._named) == kv_source._MOST_NAMED
    await lender.source.unpin([f"p{kv_source._MOST_NAMED}"])
    assert len(lender.engine.held) == kv_source._MOST_NAMED + 4
