"""Which workers thrash: what begins and what ends it."""

from __future__ import annotations

from dynamo_local.core.messages.presence import EngineInfo, Load, Presence
from dynamo_local.core.migration.rebalancing import CALM_S, ThrashWatch

ENGINE = EngineInfo("e", "m", 1000, 10, 100, 8)


def worker(lease: str, at: float, preempted: int | None = 0, recomputed: int | None = 0) -> Presence:
    load = Load(3, 0, 0.5, at=at, head_tokens=0, preempted_tokens=preempted, recomputed_tokens=recomputed)
    return Presence("w", "W", "aggregated", lease, 1, "ready", engine=ENGINE, load=load)


def looked(watch: ThrashWatch, at: float, preempted: int | None = 0, recomputed: int | None = 0) -> bool:
    return "w" in watch.look([worker("other", at), worker("w", at, preempted, recomputed)], at)


def test_one_preemption_is_no_spiral() -> None:
    watch = ThrashWatch()
    assert not looked(watch, 0.0)
    assert not looked(watch, 0.5, preempted=100, recomputed=100)
    assert not looked(watch, 1.0, recomputed=100)
    assert not looked(watch, 1.0 + CALM_S, preempted=50, recomputed=150)


def test_it_begins_with_the_second_sign_and_ends_when_there_has_been_none_for_a_while() -> None:
    watch = ThrashWatch()
    assert not looked(watch, 0.0)
    assert not looked(watch, 0.5, preempted=100, recomputed=100)
    assert looked(watch, 1.0, preempted=100, recomputed=100)
    assert looked(watch, 1.0 + CALM_S, recomputed=100)
    assert not looked(watch, 1.1 + CALM_S, recomputed=100)


def test_what_was_preempted_and_came_back_between_two_looks_is_a_sign_too() -> None:
    watch = ThrashWatch()
    assert not looked(watch, 0.0, recomputed=1000)
    assert not looked(watch, 0.5, recomputed=1100)
    assert looked(watch, 1.0, recomputed=1200)


def test_a_load_that_was_told_before_is_no_sign() -> None:
    watch = ThrashWatch()
    # Its moment is known from its age, and messages do not travel equally fast.
    for now, at in ((0.0, 0.0), (0.5, 0.02), (1.0, -0.01), (1.5, 0.04)):
        assert watch.look([worker("w", at, preempted=100, recomputed=100)], now) == set()


def test_what_is_not_known_is_no_sign() -> None:
    watch = ThrashWatch()
    for at in (0.0, 0.5, 1.0):
        assert not looked(watch, at, None, None)
    assert watch.look([Presence("w", "W", "aggregated", "w", 1, "ready", engine=ENGINE)], 1.5) == set()
    assert not looked(watch, 2.0, preempted=10, recomputed=10)
