"""An engine keeps to its cores while they are its own, leaves when it is starved, and comes back without flapping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.process.soft_binding import Binding, BindingLimits, Shares, others_of, rebind

LIMITS = BindingLimits()
HOME = frozenset({0})
EVERY_S = 0.25

Look = tuple[float, Mapping[int, float]]
"""The share of time that the engine has waited, and what others have of each core."""


class Course:
    """Looks at an engine in a row, and the cores it had after each."""

    def __init__(self, home: frozenset[int] = HOME, now: float = 0.0) -> None:
        self.binding = Binding(home, home)
        self.now = now
        self.cores: list[frozenset[int]] = []

    def look(self, waiting: float, others: Mapping[int, float], seconds: float = EVERY_S) -> frozenset[int]:
        self.now += seconds
        self.binding = rebind(self.binding, Shares(seconds, waiting * seconds, {}), others, self.now)
        self.cores.append(self.binding.cores)
        return self.binding.cores

    def seconds_until(
        self, met: Callable[[frozenset[int]], bool], waiting: float, others: Mapping[int, float]
    ) -> float:
        began = self.now
        while not met(self.look(waiting, others)):
            assert self.now - began < 10 * LIMITS.quiet_max_s, "it stays where it is"
        return self.now - began

    @property
    def moves(self) -> int:
        return sum(a != b for a, b in pairwise(self.cores))


BUSY_NEIGHBOUR = {0: 0.95, 1: 0.1}
QUIET = {0: 0.02, 1: 0.1}

shares = st.floats(0.0, 1.0)
looks = st.tuples(st.floats(0.0, 4.0), st.fixed_dictionaries(dict.fromkeys(range(3), shares)))


def test_a_starved_engine_leaves_within_half_a_second() -> None:
    course = Course()
    assert course.seconds_until({1}.__eq__, 0.95, BUSY_NEIGHBOUR) <= 0.5


def test_an_engine_whose_own_threads_wait_for_each_other_stays() -> None:
    course = Course()
    assert {course.look(1.4, QUIET) for _ in range(100)} == {HOME}


def test_an_engine_stays_beside_neighbours_that_leave_it_what_it_needs() -> None:
    course = Course()
    assert {course.look(0.1, BUSY_NEIGHBOUR) for _ in range(100)} == {HOME}


def test_where_all_cores_are_as_busy_there_is_nowhere_to_go() -> None:
    course = Course()
    assert {course.look(0.95, {0: 0.95, 1: 0.9}) for _ in range(100)} == {HOME}


def test_it_comes_back_when_its_cores_have_been_quiet_for_a_while() -> None:
    course = Course()
    course.seconds_until({1}.__eq__, 0.95, BUSY_NEIGHBOUR)
    assert LIMITS.quiet_s <= course.seconds_until(HOME.__eq__, 0.0, QUIET) <= LIMITS.quiet_s + EVERY_S


def test_a_moment_of_noise_begins_the_wait_anew() -> None:
    course = Course()
    course.seconds_until({1}.__eq__, 0.95, BUSY_NEIGHBOUR)
    for _ in range(5):
        course.look(0.0, QUIET, seconds=LIMITS.quiet_s - 0.1)
        assert course.look(0.0, BUSY_NEIGHBOUR) == {1}


def test_an_hour_without_requests_on_quiet_cores_is_long_enough() -> None:
    course = Course()
    course.seconds_until({1}.__eq__, 0.95, BUSY_NEIGHBOUR)
    assert course.look(0.0, QUIET, seconds=3600.0) == HOME


def test_it_goes_on_when_the_neighbour_follows() -> None:
    course = Course()
    course.seconds_until({1}.__eq__, 0.95, {0: 0.95, 1: 0.1, 2: 0.3})
    took_s = course.seconds_until({2}.__eq__, 0.95, {0: 0.95, 1: 0.95, 2: 0.3})
    assert took_s <= LIMITS.settle_s + EVERY_S


def test_two_engines_do_not_stay_on_the_core_of_one() -> None:
    course = Course()
    course.seconds_until({1}.__eq__, 0.95, BUSY_NEIGHBOUR)
    assert course.seconds_until(HOME.__eq__, 0.5, {0: 0.35, 1: 0.5}) <= LIMITS.settle_s + EVERY_S


def test_several_cores_are_as_slow_as_the_most_crowded_of_them() -> None:
    course = Course(frozenset({0, 1}))
    others = {0: 0.0, 1: 0.9, 2: 0.1, 3: 0.2}
    course.seconds_until({0, 2}.__eq__, 0.5, others)


def test_a_neighbour_that_comes_and_goes_is_waited_for_longer_each_time() -> None:
    course = Course()
    waits = []
    for _ in range(8):
        course.seconds_until({1}.__eq__, 0.95, BUSY_NEIGHBOUR)
        waits.append(course.seconds_until(HOME.__eq__, 0.0, QUIET))
    assert waits == sorted(waits)
    assert waits[0] <= LIMITS.quiet_s + EVERY_S
    assert LIMITS.quiet_max_s <= waits[-1] <= LIMITS.quiet_max_s + EVERY_S


def test_a_long_stay_makes_up_for_it() -> None:
    course = Course()
    for _ in range(4):
        course.seconds_until({1}.__eq__, 0.95, BUSY_NEIGHBOUR)
        course.seconds_until(HOME.__eq__, 0.0, QUIET)
    course.look(0.0, QUIET, seconds=LIMITS.proven_s)
    course.seconds_until({1}.__eq__, 0.95, BUSY_NEIGHBOUR)
    assert course.seconds_until(HOME.__eq__, 0.0, QUIET) <= LIMITS.quiet_s + EVERY_S


@given(st.lists(looks, max_size=200), st.sampled_from([{0}, {1, 2}]))
def test_whatever_happens_it_has_as_many_cores_as_its_slot(course_of: list[Look], home: set[int]) -> None:
    course = Course(frozenset(home))
    for waiting, others in course_of:
        cores = course.look(waiting, others)
        assert len(cores) == len(home)
        assert cores <= others.keys()


@given(st.lists(looks, max_size=200))
def test_whatever_happens_it_moves_twice_in_two_seconds_at_most(course_of: list[Look]) -> None:
    """The engine also returns to its cores no more often than `return_after_s` allows."""
    course = Course()
    returns = []
    for waiting, others in course_of:
        was = course.binding.cores
        if course.look(waiting, others) == HOME != was:
            returns.append(course.now)
    assert course.moves <= 2 + 2 * course.now / LIMITS.settle_s
    assert all(b - a >= LIMITS.settle_s for a, b in pairwise(returns))


@given(st.lists(looks, max_size=100), st.floats(0.6, 1.0), st.floats(0.6, 1.0))
def test_whatever_has_happened_a_starved_engine_is_soon_where_others_leave_more(
    course_of: list[Look], waiting: float, crowd: float
) -> None:
    course = Course()
    for past in course_of:
        course.look(*past)
    others = {core: crowd if core in course.binding.cores else 0.0 for core in range(3)}
    left = course.binding.cores
    assert course.seconds_until(lambda cores: cores != left, waiting, others) <= LIMITS.settle_s + 2 * EVERY_S


@given(st.lists(looks, max_size=100))
def test_whatever_has_happened_it_is_at_home_when_all_has_been_quiet(course_of: list[Look]) -> None:
    course = Course()
    for past in course_of:
        course.look(*past)
    if not course.binding.at_home:
        assert course.seconds_until(HOME.__eq__, 0.0, dict.fromkeys(range(3), 0.0)) <= LIMITS.quiet_max_s + EVERY_S


def test_processes_that_may_run_anywhere_leave_their_cores_for_all() -> None:
    course = Course()
    course.binding = Binding(HOME, HOME, anywhere=True)
    course.seconds_until({0, 1}.__eq__, 0.95, {0: 0.95, 1: 0.95})
    assert {course.look(0.95, {0: 0.95, 1: 0.95}) for _ in range(20)} == {frozenset({0, 1})}
    course.seconds_until(HOME.__eq__, 0.0, QUIET)


@given(st.dictionaries(st.integers(0, 3), st.floats(0, 10)), st.dictionaries(st.integers(0, 3), st.floats(0, 10)))
def test_what_others_have_is_a_share_and_nothing_of_it_is_ours(busy: dict[int, float], own: dict[int, float]) -> None:
    others = others_of(busy, own, 2.0)
    assert others.keys() == busy.keys()
    for core, share in others.items():
        assert 0.0 <= share <= min(busy[core] / 2.0, 1.0)
        assert share == 0.0 or share >= min((busy[core] - own.get(core, 0.0)) / 2.0, 1.0) - 1e-9


def test_recorded_beside_a_busy_loop_the_engine_leaves() -> None:
    """Figures of a real engine: in 0.25 s its threads ran for 14 ms and waited for 0.47 s."""
    shares = Shares(0.25, 0.47, {0: 0.014})
    others = others_of({0: 0.25, 1: 0.06}, shares.ran_s, 0.25)
    assert rebind(Binding(HOME, HOME), shares, others, now=1.0).cores == {1}
