"""Messages that take time in simulated fleets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_local.core.ports import CacheChanges
from dynamo_local.core.routing.policies import POLICIES
from dynamo_local.sim.fleet import AT_ONCE, Messages, Result, names, simulate
from dynamo_local.sim.requests import Arrival, Served
from dynamo_local.sim.routers import Placement, PolicyRouter
from dynamo_local.sim.worker import MockerTiming, StepWork
from tests.unit.sim.workloads import SMALL, workloads

_TICK_S = 1 / 1024
"""All times are multiples of it, so that sums of them are exact."""

MESSAGES = st.builds(Messages, *[st.integers(0, 200).map(lambda ticks: ticks * _TICK_S)] * 2)


class _Ticks:
    def step_s(self, work: StepWork) -> float:
        return (8 + work.prefill_tokens) * _TICK_S

    def decode_s(self, work: StepWork, steps: int) -> float:
        return steps * self.step_s(work)


class _Listening(PolicyRouter):
    """Notes, whenever it places a request, of which others it has heard what."""

    def __init__(self, policy: str, workers: int) -> None:
        super().__init__(POLICIES[policy](), names(workers), SMALL, pulls=True)
        self._begun: frozenset[int] = frozenset()
        self._over: frozenset[int] = frozenset()
        self._changes = 0
        self.known: list[tuple[float, frozenset[int], frozenset[int]]] = []
        self.changes: list[int] = []

    def place(self, arrival: Arrival, now: float) -> Placement:
        self.known.append((now, self._begun, self._over))
        self.changes.append(self._changes)
        return super().place(arrival, now)

    def first_token(self, arrival: Arrival) -> None:
        self._begun |= {arrival.number}
        super().first_token(arrival)

    def ended(self, arrival: Arrival) -> None:
        self._over |= {arrival.number}
        super().ended(arrival)

    def cache_changed(self, worker: str, changes: CacheChanges) -> None:
        self._changes += 1
        super().cache_changed(worker, changes)


def _in_ticks(arrival: Arrival) -> Arrival:
    then = None if arrival.then is None else _in_ticks(arrival.then)
    return replace(arrival, at=round(arrival.at / _TICK_S) * _TICK_S, then=then)


def _simulated(router: PolicyRouter, arrivals: Sequence[Arrival], messages: Messages) -> Result:
    return simulate(arrivals, router, 3, SMALL, _Ticks(), messages=messages)


def _told(served: Served) -> tuple[object, ...]:
    return (served.worker, served.cached, served.preempted, served.drawn, served.longest_gap_s)


@given(workloads(), MESSAGES)
@settings(max_examples=60, deadline=None)
def test_where_places_depend_on_no_message_answers_come_later_by_what_messages_take(
    arrivals: list[Arrival], messages: Messages
) -> None:
    alone = [replace(_in_ticks(each), then=None) for each in arrivals]
    at_once, late = (_simulated(_Listening("round-robin", 3), alone, each) for each in (AT_ONCE, messages))
    assert late.gaps == at_once.gaps
    for some, other in zip(at_once.served, late.served, strict=True):
        assert _told(some) == _told(other)
        assert other.first_token_at - some.first_token_at == messages.round_trip_s
        assert other.ended_at - some.ended_at == messages.round_trip_s


@given(workloads(), MESSAGES, st.sampled_from(["kv", "least-loaded", "freeness"]))
@settings(max_examples=60, deadline=None)
def test_the_router_knows_what_clients_know(arrivals: list[Arrival], messages: Messages, policy: str) -> None:
    router = _Listening(policy, 3)
    served = _simulated(router, [_in_ticks(each) for each in arrivals], messages).served
    for now, begun, over in router.known:
        for each in served:
            number = each.arrival.number
            assert each.first_token_at <= now if number in begun else each.first_token_at >= now
            assert each.ended_at <= now if number in over else each.ended_at >= now


@given(workloads(), MESSAGES)
@settings(max_examples=20, deadline=None)
def test_a_session_goes_on_when_its_client_has_the_answer(arrivals: list[Arrival], messages: Messages) -> None:
    result = _simulated(_Listening("kv", 3), [_in_ticks(each) for each in arrivals], messages)
    served = {each.arrival.number: each for each in result.served}
    for each in result.served:
        if each.arrival.then is not None:
            assert served[each.arrival.then.number].at == each.ended_at + each.arrival.then.at


def test_the_router_hears_of_cached_blocks_when_their_message_is_there() -> None:
    messages, prompt = Messages(0.5, 0.25), 40
    stored_at = messages.to_worker_s + 3 * MockerTiming(SMALL).step_s(StepWork(16, 0, 0))
    hears_at = stored_at + messages.from_worker_s
    router = _Listening("kv", 1)
    arrivals = [Arrival(0, 0.0, prompt, 100), Arrival(1, 0.5 * (stored_at + hears_at), 8, 1), Arrival(2, 1e3, 8, 1)]
    simulate(arrivals, router, 1, replace(SMALL, mocker_max_num_batched_tokens=64), _Ticks(), messages=messages)
    assert router.changes[:2] == [0, 0]
    assert router.changes[2] > 0
