"""A worker that is set apart for one request takes no other one, and says when it has no other one left."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from components.workers.exclusivity import ASK_TTL_S, Exclusivity
from dynamo_local.core.messages.presence import Exclusive, Presence
from dynamo_local.core.messages.work import AskExclusive, EndExclusive, RequestEpoch, Submit

ASK = AskExclusive("r", "f")


@dataclass
class Announced:
    """An announcer without a bus, which keeps the presence."""

    presence: Presence = Presence("w", "w", "decode", "lease", 1, "ready")  # noqa: RUF009  # frozen

    def update(self, **changes: Any) -> None:
        self.presence = msgspec.structs.replace(self.presence, **changes)


@dataclass
class World:
    now: float = 100.0
    running: list[RequestEpoch] = field(default_factory=list)
    warming: bool = False
    announced: Announced = field(default_factory=Announced)

    def __post_init__(self) -> None:
        announcer: Any = self.announced
        self.exclusivity = Exclusivity(announcer, lambda: self.running, lambda: self.warming, lambda: self.now)

    @property
    def told(self) -> Exclusive | None:
        return self.announced.presence.exclusive

    def begin(self) -> None:
        assert self.exclusivity.refuses(submit()) is None
        self.running.append(RequestEpoch("r", 3))
        self.exclusivity.look()


@pytest.fixture
def world() -> World:
    return World()


def submit(request_id: str = "r", frontend: str = "f", *, exclusive: bool = True) -> Submit:
    return Submit(request_id, 3, frontend, [1], msgspec.Raw(b"\xc0"), exclusive=exclusive)


def test_it_is_free_when_all_others_have_left(world: World) -> None:
    world.running = [RequestEpoch("a", 1), RequestEpoch("b", 1)]
    world.warming = True
    world.exclusivity.ask(ASK)
    assert world.told == Exclusive("r", "f", free=False)
    for change in ("a", "b"):
        world.running = [each for each in world.running if each.request_id != change]
        world.exclusivity.look()
        assert world.told == Exclusive("r", "f", free=False)
    assert world.exclusivity.refuses(submit()) is not None
    world.warming = False
    world.exclusivity.look()
    assert world.told == Exclusive("r", "f", free=True)


def test_it_takes_nobody_else(world: World) -> None:
    assert world.exclusivity.refuses(submit(exclusive=False)) is None
    assert world.exclusivity.refuses(submit()) is not None
    world.exclusivity.ask(ASK)
    for other in (submit("other"), submit("other", exclusive=False), submit("r", "g"), submit(exclusive=False)):
        assert world.exclusivity.refuses(other) is not None
    world.exclusivity.ask(AskExclusive("other", "f"))
    world.exclusivity.end(EndExclusive("other", "f"))
    assert world.told == Exclusive("r", "f", free=True)


def test_it_ends_when_the_frontend_says_so(world: World) -> None:
    world.exclusivity.ask(ASK)
    world.begin()
    world.exclusivity.end(EndExclusive("r", "f"))
    assert world.told is None
    assert world.exclusivity.refuses(submit("other", exclusive=False)) is None


def test_it_ends_with_the_request(world: World) -> None:
    world.exclusivity.ask(ASK)
    world.begin()
    world.now += 10 * ASK_TTL_S
    world.exclusivity.look()
    assert world.told == Exclusive("r", "f", free=True)
    world.running.clear()
    world.exclusivity.look()
    assert world.told is None


def test_it_ends_when_nobody_asks_any_more_and_the_request_has_not_come(world: World) -> None:
    world.exclusivity.ask(ASK)
    for _ in range(5):
        world.now += 0.9 * ASK_TTL_S
        world.exclusivity.ask(ASK)
        assert world.told is not None
    world.now += 1.1 * ASK_TTL_S
    world.exclusivity.look()
    assert world.told is None
