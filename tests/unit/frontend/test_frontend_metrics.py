"""/metrics of several frontends: the one that is asked shows all, also what those had counted that are gone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from components.frontend.metrics import FrontendMetrics
from dynamo_local.core import codec
from dynamo_local.core.codec import Message
from dynamo_local.core.errors import BusError
from dynamo_local.core.fleet.view import FRONTEND_ROLE, FleetView
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.subjects import Subjects
from dynamo_local.monitor.exposition import collected, expose
from dynamo_local.monitor.metrics import IN_FLIGHT, PLANNER_ACTS, PLANNER_DEVICES, USAGE_PROMPT, Sample

SUBJECTS = Subjects("ns")


@dataclass
class Here:
    """A bus in this process. `silent`: subjects on which nobody answers."""

    handlers: dict[str, Any] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)

    async def serve(self, subject: str, kind: Any, handler: Any) -> None:
        self.handlers[subject] = handler

    async def ask(self, subject: str, message: Message, reply: Any, *, timeout_s: float) -> Any:
        if subject in self.silent:
            raise BusError(f"no answer within {timeout_s:g} s")
        return codec.decode(codec.encode(await self.handlers[subject](message)), reply)


@dataclass
class Frontends:
    """Frontends of one server, which know of each other."""

    bus: Here = field(default_factory=Here)
    view: FleetView = field(default_factory=FleetView)
    metrics: dict[str, FrontendMetrics] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    async def start(self, lease: str, tokens: int) -> None:
        registry = CollectorRegistry()
        self.tokens[lease] = tokens
        expose(lambda: self._samples(lease, ""), registry=registry)
        self.metrics[lease] = FrontendMetrics(
            cast("Any", self.bus),
            SUBJECTS,
            lease,
            cast("Any", self),
            lambda: self._samples(lease, "team"),
            lambda: collected(registry),
        )
        await self.metrics[lease].start()
        self.view.observe(Presence(f"ns_Frontend_{lease}", "Frontend", FRONTEND_ROLE, lease, 1, "ready"), 0.0)

    def _samples(self, lease: str, key: str) -> Iterator[Sample]:
        yield Sample(USAGE_PROMPT, ("m", key), self.tokens[lease])
        if not key:
            yield Sample(IN_FLIGHT, ("m",), 2)
            yield Sample(PLANNER_DEVICES, (), 3)
            yield Sample(PLANNER_ACTS, (), True)

    def hang(self, lease: str) -> None:
        self.bus.silent.add(SUBJECTS.metrics(lease))

    def kill(self, lease: str) -> None:
        self.hang(lease)
        self.view.expire(1_000.0, [each for each in self.metrics if each != lease])

    async def shown(self, lease: str, *, by_key: bool = False) -> dict[str, float]:
        text = (await self.metrics[lease].text(by_key=by_key)).decode()
        return {
            sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples
        }


PROMPT = "dynamo_usage_prompt_tokens_total"
FRONTENDS, UNREAD = "dynamo_frontends", "dynamo_frontends_unread"


async def test_any_shows_the_sum_of_all() -> None:
    frontends = Frontends()
    await frontends.start("a", 5)
    assert (await frontends.shown("a"))[FRONTENDS] == 1
    await frontends.start("b", 7)
    for lease in "ab":
        shown = await frontends.shown(lease)
        assert shown == {
            PROMPT: 12,
            IN_FLIGHT.name: 4,
            PLANNER_DEVICES.name: 3,
            PLANNER_ACTS.name: 1,
            FRONTENDS: 2,
            UNREAD: 0,
        }


async def test_administrators_see_keys_of_all() -> None:
    frontends = Frontends()
    await frontends.start("a", 5)
    await frontends.start("b", 7)
    for by_key, key in ((True, "team"), (False, "")):
        text = (await frontends.metrics["b"].text(by_key=by_key)).decode()
        assert f'{PROMPT}{{key="{key}",model="m"}} 12.0' in text
        assert text.count(f"{PROMPT}{{") == 1


async def test_the_counters_of_one_that_hangs_stay_and_it_is_told() -> None:
    frontends = Frontends()
    await frontends.start("a", 5)
    await frontends.start("b", 7)
    await frontends.shown("a")
    frontends.hang("b")
    frontends.tokens |= {"a": 6, "b": 9}
    shown = await frontends.shown("a")
    assert (shown[PROMPT], shown[FRONTENDS], shown[UNREAD]) == (13, 1, 1)
    assert shown[IN_FLIGHT.name] == 2, "what was under way a while ago is not what is under way"
    frontends.bus.silent.clear()
    shown = await frontends.shown("a")
    assert (shown[PROMPT], shown[FRONTENDS], shown[UNREAD]) == (15, 2, 0)


async def test_what_a_dead_one_had_counted_stays_in_the_sum_of_all_others() -> None:
    frontends = Frontends()
    for lease, tokens in (("a", 5), ("b", 7), ("c", 11)):
        await frontends.start(lease, tokens)
    await frontends.shown("a")
    frontends.tokens["c"] = 12
    await frontends.shown("b")
    frontends.kill("c")
    shown = await frontends.shown("a")
    assert (shown[PROMPT], shown[FRONTENDS], shown[UNREAD]) == (24, 2, 0), "b has seen more of c than a has"
    await frontends.start("d", 0)
    assert (await frontends.shown("d"))[PROMPT] == 24, "one that comes later learns it"
    assert (await frontends.shown("b"))[PROMPT] == 24
