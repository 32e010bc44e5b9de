"""Routing by load: the ledger adds up, the choice ignores the order of its input, a burst spreads evenly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.routing import AssignRequest, Charge
from dynamo_local.core.routing.caches.index import pack
from dynamo_local.core.routing.ledger import NEVER, Ledger
from dynamo_local.core.routing.policies import LeastOutstandingTokens

WORKERS = "abcd"
policy = LeastOutstandingTokens()


def worker(lease: str) -> Presence:
    return Presence(watcher=f"ns_W_{lease}", component="W", role="decode", lease=lease, pid=1, state="ready")


def asking(tokens: int = 10, avoid: tuple[str, ...] = (), request_id: str = "r") -> AssignRequest:
    return AssignRequest(request_id=request_id, frontend="f", tokens=tokens, avoid=avoid)


def choose(request: AssignRequest, candidates: Sequence[Presence], ledger: Ledger) -> str | None:
    choice = policy.choose(request, candidates, ledger, now=0.0)
    return None if choice is None else choice.worker


requests = st.tuples(st.sampled_from("fg"), st.integers(0, 5).map(str))
charges = st.tuples(st.just("charge"), requests, st.sampled_from(WORKERS), st.integers(0, 1000))
releases = st.tuples(st.just("release"), requests)
losses = st.tuples(st.sampled_from(["frontend f", "frontend g", *(f"worker {w}" for w in WORKERS)]))
histories = st.lists(charges | releases | losses, max_size=40)


def replay(history: list[tuple[object, ...]]) -> tuple[Ledger, dict[tuple[str, str], tuple[str, int]]]:
    """The ledger after a history, and a plain table of who holds what."""
    ledger, table = Ledger(), dict[tuple[str, str], tuple[str, int]]()
    for event in history:
        match event:
            case ("charge", (str(frontend), str(request)), str(lease), int(tokens)):
                ledger.charge(frontend, request, lease, tokens)
                table[frontend, request] = (lease, tokens)
            case ("release", (str(frontend), str(request))):
                ledger.release(frontend, request)
                table.pop((frontend, request), None)
            case (str(loss),):
                what, _, name = loss.partition(" ")
                if what == "frontend":
                    ledger.forget_frontend(name)
                    table = {key: value for key, value in table.items() if key[0] != name}
                else:
                    ledger.forget_worker(name)
                    table = {key: value for key, value in table.items() if value[0] != name}
    return ledger, table


@given(histories)
def test_outstanding_tokens_are_the_sum_of_what_is_not_released(history: list[tuple[object, ...]]) -> None:
    ledger, table = replay(history)
    for lease in WORKERS:
        assert ledger.outstanding(lease) == sum(tokens for owner, tokens in table.values() if owner == lease)


@given(histories)
def test_when_all_is_released_nothing_is_left(history: list[tuple[object, ...]]) -> None:
    ledger, _ = replay(history)
    ledger.forget_frontend("f")
    ledger.forget_frontend("g")
    assert [ledger.outstanding(lease) for lease in WORKERS] == [0] * len(WORKERS)


@given(histories, st.lists(st.sampled_from(WORKERS), unique=True), st.randoms())
def test_the_order_of_candidates_does_not_matter(
    history: list[tuple[object, ...]], present: list[str], random: Random
) -> None:
    ledger, _ = replay(history)
    candidates = [worker(lease) for lease in present]
    chosen = choose(asking(), candidates, ledger)
    random.shuffle(candidates)
    assert choose(asking(), candidates, ledger) == chosen


@given(histories, st.lists(st.sampled_from(WORKERS), unique=True), st.lists(st.sampled_from(WORKERS)))
def test_only_a_candidate_with_the_least_load_is_chosen(
    history: list[tuple[object, ...]], present: list[str], avoid: list[str]
) -> None:
    ledger, _ = replay(history)
    chosen = choose(asking(avoid=tuple(avoid)), [worker(lease) for lease in present], ledger)
    if not present:
        assert chosen is None
        return
    wanted = [lease for lease in present if lease not in avoid] or present
    assert chosen in wanted
    assert ledger.outstanding(chosen) == min(ledger.outstanding(lease) for lease in wanted)


@given(st.integers(1, 4), st.integers(0, 60))
def test_a_burst_of_equal_requests_spreads_evenly(workers: int, burst: int) -> None:
    ledger, given_to = Ledger(), Counter[str]()
    candidates = [worker(lease) for lease in WORKERS[:workers]]
    for number in range(burst):
        chosen = choose(asking(), candidates, ledger)
        assert chosen is not None
        ledger.charge("f", str(number), chosen, 10)
        given_to[chosen] += 1
    counts = [given_to[lease] for lease in WORKERS[:workers]]
    assert max(counts) - min(counts) <= 1


@given(st.lists(st.integers(1, 1000), max_size=60))
def test_loads_differ_by_no_more_than_the_largest_request(sizes: list[int]) -> None:
    ledger = Ledger()
    for number, tokens in enumerate(sizes):
        chosen = choose(asking(tokens), [worker(lease) for lease in WORKERS], ledger)
        assert chosen is not None
        ledger.charge("f", str(number), chosen, tokens)
    loads = [ledger.outstanding(lease) for lease in WORKERS]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_one_request_after_another_takes_turns() -> None:
    ledger, order = Ledger(), list[str]()
    for number in range(4):
        chosen = choose(asking(), [worker("a"), worker("b")], ledger)
        assert chosen is not None
        ledger.charge("f", str(number), chosen, 10)
        ledger.release("f", str(number))
        order.append(chosen)
    assert order == ["a", "b", "a", "b"]


def test_a_request_has_one_owner() -> None:
    ledger = Ledger()
    ledger.charge("f", "r", "a", 10)
    ledger.charge("f", "r", "b", 20)
    ledger.charge("g", "r", "a", 5)
    assert (ledger.outstanding("a"), ledger.outstanding("b")) == (5, 20)


def test_unknown_things_are_released_without_ado() -> None:
    ledger = Ledger()
    ledger.release("f", "r")
    ledger.forget_frontend("f")
    ledger.forget_worker("a")
    assert (ledger.outstanding("a"), ledger.last_assigned("a")) == (0, NEVER)


def test_what_a_frontend_says_of_itself_settles_what_was_missed() -> None:
    ledger = Ledger()
    ledger.charge("f", "ended unheard", "a", 10, now=1.0)
    ledger.charge("f", "going on", "a", 5, now=1.0)
    ledger.charge("f", "just assigned", "a", 2, now=9.0)
    ledger.charge("g", "another's", "a", 1, now=1.0)
    told = [Charge("going on", "a", 5), Charge("never heard of", "b", 7)]
    ledger.settle("f", told, since=8.0)
    assert {charge.request_id for charge in ledger.of_frontend("f")} == {"going on", "just assigned", "never heard of"}
    assert (ledger.outstanding("a"), ledger.outstanding("b")) == (5 + 2 + 1, 7)
    before = ledger.of_frontend("f")
    ledger.settle("f", told, since=8.0)
    assert ledger.of_frontend("f") == before


def test_a_new_worker_is_not_given_everything_that_comes_one_by_one() -> None:
    ledger = Ledger()
    chosen = []
    for number in range(6):
        request = AssignRequest(request_id=str(number), frontend="f", tokens=1)
        candidates = [worker("a"), worker("b")] if number > 1 else [worker("a")]
        lease = choose(request, candidates, ledger)
        assert lease is not None
        ledger.charge("f", request.request_id, lease, 1)
        ledger.release("f", request.request_id)
        chosen.append(lease)
    assert chosen == ["a", "a", "b", "a", "b", "a"]


def test_tokens_to_compute_are_those_that_are_not_cached_until_the_first_token() -> None:
    ledger = Ledger()
    ledger.charge("f", "r", "a", 100, uncached=40)
    ledger.charge("f", "s", "a", 10)
    assert (ledger.outstanding("a"), ledger.uncached("a"), ledger.requests("a")) == (110, 50, 2)
    ledger.prefilled("f", "r")
    assert (ledger.outstanding("a"), ledger.uncached("a"), ledger.requests("a")) == (110, 10, 2)
    ledger.release("f", "r")
    ledger.release("f", "s")
    assert (ledger.outstanding("a"), ledger.uncached("a"), ledger.requests("a")) == (0, 0, 0)


def test_a_frontends_account_tells_which_prompts_are_computed() -> None:
    ledger = Ledger()
    ledger.charge("f", "r", "a", 100, uncached=40)
    ledger.settle("f", [Charge("r", "a", 100, 0), Charge("s", "a", 10, 7)], since=0.0)
    assert ledger.uncached("a") == 7


def test_blocks_come_to_a_worker_until_its_last_request_with_them_has_ended() -> None:
    ledger = Ledger()
    ledger.charge("f", "r", "a", 100, blocks=pack([1, 2, 3]))
    ledger.charge("f", "s", "a", 100, blocks=pack([1, 2, 4]))
    assert ledger.index.cached(pack([1, 2, 3])) == {"a": 3}
    ledger.release("f", "r")
    assert ledger.index.cached(pack([1, 2, 3])) == {"a": 2}
    ledger.forget_worker("a")
    assert ledger.index.cached(pack([1, 2, 3])) == {}
