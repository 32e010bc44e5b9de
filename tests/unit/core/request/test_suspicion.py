"""Requests that end engines end few of them, and those beside them finish: in a model of a frontend and its workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_local.core.messages.presence import Exclusive, Load, Presence
from dynamo_local.core.request.recovery import CLEARING_TOKENS, COMPANY_DEATHS, Ask, Begin, Standing, next_step


@dataclass
class Asked:
    """A request in the model. `kills(position, since)`: whether an engine dies of computing that position, so many
    tokens after it took the request up."""

    name: str
    tokens: int
    arrives: int = 0
    """At which step."""
    kills: Callable[[int, int], bool] | None = None
    position: int = 0
    taken_up: int = 0
    worker: int | None = None
    standing: Standing = field(default_factory=Standing)
    caused: int = 0
    """Engines that died of it."""

    @property
    def is_over(self) -> bool:
        return self.standing.guilty or self.position >= self.tokens

    def take_up(self, worker: int) -> None:
        self.worker, self.taken_up = worker, self.position


@dataclass
class Model:
    """Engines start anew at once, and one token is computed at a time, of a request that `choose` picks. Each worker is
    either one suspect's, or has company."""

    workers: int
    requests: list[Asked]
    choose: Callable[[int], int]
    exclusive: dict[int, Asked] = field(default_factory=dict)

    def run(self) -> None:
        """Until all requests are over. Each step is a token or a death, and there are not many of either."""
        steps = sum(request.tokens + 4 for request in self.requests) + max(each.arrives for each in self.requests)
        for now in range(steps):
            self.place(now)
            running = [request for request in self.requests if request.worker is not None]
            self.check()
            if running:
                self.compute(running[self.choose(len(running))])
        assert all(request.is_over for request in self.requests), "somebody waits for ever"

    def place(self, now: int) -> None:
        there = [request for request in self.requests if request.arrives <= now and not request.is_over]
        waiting = [request for request in there if request.worker is None]
        suspects = [request for request in waiting if request.standing.suspect]
        if suspects and not self.exclusive:
            self.set_apart(suspects[0])
        for request in waiting:
            free = [worker for worker in range(self.workers) if worker not in self.exclusive]
            if not request.standing.suspect and free:
                request.take_up(free[self.choose(len(free))])

    def set_apart(self, suspect: Asked) -> None:
        """As frontends and workers do."""
        step = next_step(suspect.name, "f", [self.presence(worker) for worker in range(self.workers)], None)
        assert isinstance(step, Ask)
        worker = int(step.worker)
        self.exclusive[worker] = suspect
        assert next_step(suspect.name, "f", [self.presence(worker)], step.worker) in (Begin(f"{worker}"), step)
        for other in self.requests:
            if other.worker == worker:
                other.worker = None
        assert next_step(suspect.name, "f", [self.presence(worker)], step.worker) == Begin(f"{worker}")
        suspect.take_up(worker)

    def presence(self, worker: int) -> Presence:
        there = [request for request in self.requests if request.worker == worker]
        suspect = self.exclusive.get(worker)
        exclusive = None if suspect is None else Exclusive(suspect.name, "f", free=not there)
        load = Load(len(there), 0, 0.0)
        return Presence(f"w{worker}", "w", "decode", f"{worker}", 1, "ready", load=load, exclusive=exclusive)

    def compute(self, request: Asked) -> None:
        worker = request.worker
        assert worker is not None
        if request.kills is not None and request.kills(request.position, request.position - request.taken_up):
            request.caused += 1
            for victim in [other for other in self.requests if other.worker == worker]:
                victim.worker, victim.standing = None, victim.standing.after_death()
            self.exclusive.pop(worker, None)
            return
        request.position += 1
        request.standing = request.standing.after_tokens(request.position - request.taken_up)
        if request.is_over:
            request.worker = None
        if self.exclusive.get(worker) is request and (request.is_over or not request.standing.suspect):
            del self.exclusive[worker]

    def check(self) -> None:
        """Suspects share a worker with nobody."""
        for worker, suspect in self.exclusive.items():
            assert [request for request in self.requests if request.worker == worker] == [suspect]
        for request in self.requests:
            assert not request.standing.suspect or request.worker is None or request.worker in self.exclusive


def at(position: int) -> Callable[[int, int], bool]:
    """An engine dies of that position whenever it is computed."""
    return lambda here, _: here >= position


def every(tokens: int) -> Callable[[int, int], bool]:
    """An engine dies so many tokens after having taken the request up."""
    return lambda _, since: since >= tokens


lengths = st.integers(1, 8 * CLEARING_TOKENS)
guilty = st.one_of(
    st.builds(at, st.integers(0, 2 * CLEARING_TOKENS)), st.builds(every, st.integers(0, 2 * CLEARING_TOKENS))
)


@st.composite
def models(draw: st.DrawFn, killers: st.SearchStrategy[Callable[[int, int], bool]] = guilty) -> Model:
    kills = [*draw(st.lists(killers, max_size=5)), *[None] * draw(st.integers(1, 4))]
    requests = [
        Asked(f"r{number}", draw(lengths), 0 if each is None else draw(st.integers(0, 100)), each)
        for number, each in enumerate(kills)
    ]
    randoms = draw(st.randoms(use_true_random=False))
    return Model(draw(st.integers(1, 3)), requests, randoms.randrange)


@settings(max_examples=200)
@given(models())
def test_the_innocent_finish_and_the_guilty_end_few_engines(model: Model) -> None:
    model.run()
    for request in model.requests:
        if request.kills is None:
            assert request.position == request.tokens
        assert request.caused <= COMPANY_DEATHS + 2


@given(models(st.builds(at, lengths) | st.builds(every, st.integers(0, CLEARING_TOKENS - 1))))
def test_three_engines_die_of_a_request_that_ends_them_soon(model: Model) -> None:
    """A request that ends engines wherever it has come to ends the next one where it ended the last."""
    model.run()
    assert all(request.caused <= COMPANY_DEATHS + 1 for request in model.requests)


@given(st.lists(st.integers(0, 40), max_size=20), st.integers(0, 5))
def test_deaths_are_never_forgotten(tokens: list[int], deaths: int) -> None:
    standing = Standing()
    for number in range(deaths):
        standing = standing.after_death()
        for count in tokens:
            standing = standing.after_tokens(count)
        assert standing.deaths == number + 1
    assert standing.after_tokens(0) == standing


def test_a_request_that_is_tried_again_stays_alone_until_it_ends() -> None:
    standing = Standing().after_death().after_death().after_tokens(CLEARING_TOKENS)
    assert (standing.suspect, standing.cleared) == (False, True)
    again = standing.after_death()
    assert (again.suspect, again.guilty) == (True, False)
    assert again.after_tokens(1000).suspect
    assert again.after_death().guilty
    assert "4 engines died while they worked on this request" in again.after_death().guilt


def worker(lease: str, running: int | None = 0, exclusive: Exclusive | None = None) -> Presence:
    load = None if running is None else Load(running, 0, 0.0)
    return Presence(f"w{lease}", "w", "decode", lease, 1, "ready", load=load, exclusive=exclusive)


def test_the_worker_with_the_fewest_requests_is_asked_and_no_other_one_then() -> None:
    fleet = [worker("a", 3), worker("b", 1), worker("c", None)]
    assert next_step("r", "f", fleet, None) == Ask("b")
    assert next_step("r", "f", fleet, "a") == Ask("a")
    assert next_step("r", "f", fleet, "gone", avoid=("b",)) == Ask("a")
    assert next_step("r", "f", [worker("c", None)], None) == Ask("c")
    assert next_step("r", "f", [], None) is None


def test_nobody_takes_a_worker_from_another_frontend() -> None:
    taken = worker("a", 0, Exclusive("r", "other", free=True))
    assert next_step("r", "f", [taken], "a") is None
    assert next_step("r", "f", [taken, worker("b", 9)], "a") == Ask("b")


def test_a_trial_follows_the_one_before_it_on_the_same_worker() -> None:
    assert next_step("r", "f", [worker("a", 1, Exclusive("before", "f", free=True))], None) == Ask("a")


def test_it_begins_when_the_worker_is_free() -> None:
    assert next_step("r", "f", [worker("a", 1, Exclusive("r", "f", free=False)), worker("b")], "b") == Ask("a")
    assert next_step("r", "f", [worker("b"), worker("a", 1, Exclusive("r", "f", free=True))], "b") == Begin("a")
