"""What frontends count together: limits hold for all of them, and what a dead one had is dropped."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.frontend.limits.places import PLACES, SIZE, Counters, Denial, Places
from dynamo_local.core.http.bounds.limits import margin_of, wait_s
from dynamo_local.core.keys.registry import MOST_KEYS
from dynamo_local.core.keys.values import ApiKey
from tests.unit.state.builders import in_child

NOW = 1000.0


def key(number: int = 1, slot: int = 0, **limits: int) -> ApiKey:
    return ApiKey(name=f"k{number}", digest=str(number), number=number, slot=slot, created_at=0.0, **limits)  # type: ignore[arg-type]


Make = Callable[[], Counters]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Counters] = []

    def one() -> Counters:
        made.append(Counters(Places(tmp_path / "run" / "limits")))
        return made[-1]

    yield one
    for counters in made:
        end(counters)


def end(counters: Counters) -> None:
    counters.close()
    counters.places.close()


def test_the_file_is_private_and_has_room_for_all_keys(make: Make, tmp_path: Path) -> None:
    counters = make()
    found = (tmp_path / "run" / "limits").stat()
    assert (stat.S_IMODE(found.st_mode), found.st_size) == (0o600, SIZE)
    last = key(slot=MOST_KEYS - 1, requests_at_once=1)
    assert counters.admit(last, NOW) is None
    assert counters.admit(last, NOW) is not None


def test_frontends_count_together(make: Make) -> None:
    one, other = make(), make()
    assert (one.places.own, other.places.own) == (0, 1)
    limited = key(requests_at_once=2, requests_per_minute=4)
    assert one.admit(limited, NOW) is None
    assert other.admit(limited, NOW) is None
    assert one.admit(limited, NOW) is Denial.AT_ONCE
    assert margin_of(other.paid_at(limited)[0], NOW, 4).remaining == 2
    one.leave(limited, 0, 0.0, NOW)
    assert other.admit(limited, NOW) is None
    other.leave(limited, 0, 0.0, NOW)
    assert other.admit(limited, NOW) is None
    other.leave(limited, 0, 0.0, NOW)
    assert one.admit(limited, NOW) is Denial.A_MINUTE
    # What was refused is not in flight.
    assert one.admit(limited, NOW + 60) is None


def test_tokens_that_were_not_used_are_given_back(make: Make) -> None:
    one, other = make(), make()
    limited = key(tokens_per_minute=100)
    assert one.admit(limited, NOW) is None
    taken = one.take_tokens(limited, 100, 90, NOW)
    assert taken is not None
    assert margin_of(taken, NOW, 100).remaining == 10
    assert other.take_tokens(limited, 100, 11, NOW) is None
    one.leave(limited, 60, taken, NOW)
    assert other.take_tokens(limited, 100, 70, NOW) is not None
    assert margin_of(one.paid_at(limited)[1], NOW, 100).remaining == 0
    other.leave(limited, -50, 0.0, NOW)
    assert other.take_tokens(limited, 100, 1, NOW) is None
    assert wait_s(other.paid_at(limited)[1], NOW, 1, 100) == pytest.approx(30.6)


def test_a_later_key_in_the_same_slot_begins_anew(make: Make) -> None:
    counters = make()
    before, after = key(1, requests_at_once=1), key(2, requests_at_once=1)
    assert counters.admit(before, NOW) is None
    assert counters.admit(after, NOW) is None
    assert counters.admit(after, NOW) is not None


def test_what_a_killed_frontend_had_in_flight_is_dropped_when_the_room_is_needed(make: Make, tmp_path: Path) -> None:
    survivor = make()
    limited = key(requests_at_once=3, requests_per_minute=5)
    assert survivor.admit(limited, NOW) is None

    def die() -> None:
        counters = Counters(Places(tmp_path / "run" / "limits"))
        for _ in range(2):
            assert counters.admit(limited, NOW) is None
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(die) == -signal.SIGKILL
    # Requests a minute are kept, requests in flight are not.
    assert [survivor.admit(limited, NOW) is None for _ in range(3)] == [True, True, False]
    assert make().places.own == 1


def test_the_next_frontend_at_a_place_begins_with_nothing_in_flight(make: Make, tmp_path: Path) -> None:
    limited = key(requests_at_once=1)

    def die() -> None:
        assert Counters(Places(tmp_path / "run" / "limits")).admit(limited, NOW) is None
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(die) == -signal.SIGKILL
    assert make().admit(limited, NOW) is None


def test_more_frontends_than_places_share_the_last(make: Make) -> None:
    frontends = [make() for _ in range(PLACES + 1)]
    assert [frontends[-2].places.own, frontends[-1].places.own] == [PLACES - 1, PLACES - 1]
    assert frontends[-1].admit(key(requests_at_once=1), NOW) is None
    assert frontends[0].admit(key(requests_at_once=1), NOW) is not None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=60), st.integers(1, 5))
def test_never_more_in_flight_than_the_limit(make: Make, steps: list[tuple[int, bool]], limit: int) -> None:
    frontends = [make() for _ in range(3)]
    limited = key(number=id(steps) % 2**40 + 1, requests_at_once=limit)
    in_flight = [0, 0, 0]
    for who, comes in steps:
        if comes:
            granted = frontends[who].admit(limited, NOW) is None
            assert granted is (sum(in_flight) < limit)
            in_flight[who] += granted
        elif in_flight[who]:
            frontends[who].leave(limited, 0, 0.0, NOW)
            in_flight[who] -= 1
    for frontend in frontends:
        end(frontend)
        frontend.close = frontend.places.close = lambda: None  # type: ignore[method-assign]
