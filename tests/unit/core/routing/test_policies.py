"""The routing policies: each keeps to its rule, whatever the order of the candidates; a prefix is found, and a burst
neither herds nor is computed twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.messages.kv import KvChanges
from dynamo_local.core.messages.presence import EngineInfo, EngineRates, Load, Presence
from dynamo_local.core.messages.routing import AssignRequest, Charge
from dynamo_local.core.routing.caches.index import pack
from dynamo_local.core.routing.ledger import Ledger
from dynamo_local.core.routing.policies import DEFAULT, POLICIES, RoutingPolicy

WORKERS = "abcd"
BLOCK = 16
NOW = 100.0
_ALL: list[RoutingPolicy] = [make() for make in POLICIES.values()]


def worker(lease: str, load: Load | None = None, places: int = 8) -> Presence:
    engine = EngineInfo("mocker", "m", 4096, BLOCK, 1000, places)
    return Presence(f"ns_W_{lease}", "W", "decode", lease, 1, "ready", engine=engine, load=load)


def asking(request_id: str, blocks: Sequence[int] = (), tokens: int = 0, avoid: tuple[str, ...] = ()) -> AssignRequest:
    return AssignRequest(request_id, "f", tokens or len(blocks) * BLOCK + 1, avoid, pack(blocks), BLOCK)


def take(
    policy: RoutingPolicy, request: AssignRequest, ledger: Ledger, candidates: Sequence[Presence] | None = None
) -> str:
    """The worker that the policy chooses, charged with the request."""
    choice = policy.choose(request, candidates or [worker(lease) for lease in WORKERS], ledger, NOW)
    assert choice is not None
    uncached = request.tokens - (choice.cached or 0)
    ledger.charge("f", request.request_id, choice.worker, request.tokens, NOW, uncached=uncached, blocks=request.blocks)
    return choice.worker


contexts = st.lists(st.integers(0, 5), unique=True, max_size=5)
histories = st.lists(st.tuples(st.sampled_from(WORKERS), contexts, st.booleans()), max_size=12)


def ledger_of(history: list[tuple[str, list[int], bool]]) -> Ledger:
    ledger = Ledger()
    for number, (lease, blocks, held) in enumerate(history):
        if held:
            ledger.index.replace(lease, (), blocks)
        else:
            ledger.charge("f", str(number), lease, len(blocks) * BLOCK, NOW, blocks=pack(blocks))
    return ledger


@pytest.mark.parametrize("policy", _ALL, ids=lambda policy: type(policy).__name__)
@given(
    histories,
    contexts,
    st.lists(st.sampled_from(WORKERS), unique=True),
    st.lists(st.sampled_from(WORKERS)),
    st.randoms(),
)
def test_the_order_of_candidates_does_not_matter_and_who_failed_is_avoided(
    policy: RoutingPolicy,
    history: list[tuple[str, list[int], bool]],
    blocks: list[int],
    present: list[str],
    avoid: list[str],
    random: Random,
) -> None:
    ledger = ledger_of(history)
    request, candidates = asking("r", blocks, avoid=tuple(avoid)), [worker(lease) for lease in present]
    choice = policy.choose(request, candidates, ledger, NOW)
    random.shuffle(candidates)
    again = policy.choose(request, candidates, ledger, NOW)
    if choice is None or again is None:
        assert not present
        assert choice is again is None
        return
    assert (again.worker, again.cached, again.pull_from) == (choice.worker, choice.cached, choice.pull_from)
    assert choice.worker in ([lease for lease in present if lease not in avoid] or present)
    assert {each.worker for each in choice.costs} == set(present)


@given(histories, contexts)
def test_predicted_tokens_are_those_of_the_leading_blocks_but_never_the_last_token(
    history: list[tuple[str, list[int], bool]], blocks: list[int]
) -> None:
    ledger = ledger_of(history)
    has = ledger.index.cached(pack(blocks))
    request = asking("r", blocks, tokens=max(len(blocks) * BLOCK, 1))
    choice = POLICIES[DEFAULT]().choose(request, [worker(lease) for lease in WORKERS], ledger, NOW)
    assert choice is not None
    for each in choice.costs:
        assert each.cached == min(has.get(each.worker, 0), max(len(blocks) - 1, 0)) * BLOCK


rates = st.one_of(
    st.none(),
    st.builds(
        EngineRates,
        *(st.one_of(st.none(), st.floats(low, high)) for low, high in ((1e-6, 1e-2), (0, 0.1), (0, 1e-2), (0, 60))),
    ),
)


@pytest.mark.parametrize("policy", _ALL, ids=lambda policy: type(policy).__name__)
@given(
    histories,
    contexts,
    st.lists(rates, min_size=len(WORKERS), max_size=len(WORKERS)),
    st.sampled_from(WORKERS),
    st.integers(1, 4_000),
    st.integers(1, 20),
)
def test_a_worker_is_no_more_attractive_with_more_in_its_queue(
    policy: RoutingPolicy,
    history: list[tuple[str, list[int], bool]],
    blocks: list[int],
    measured: list[EngineRates | None],
    busier: str,
    tokens: int,
    more: int,
) -> None:
    ledger, request = ledger_of(history), asking("r", blocks)
    candidates = [
        worker(lease, Load(running=0, waiting=0, kv_usage=0.0, at=NOW, head_tokens=0, rates=each))
        for lease, each in zip(WORKERS, measured, strict=True)
    ]
    before = policy.choose(request, candidates, ledger, NOW)
    for number in range(more):
        ledger.charge("g", str(number), busier, tokens, NOW)
    after = policy.choose(request, candidates, ledger, NOW)
    assert before is not None
    assert after is not None
    assert after.worker in (before.worker, *(lease for lease in WORKERS if lease != busier))
    costs = {each.worker: each.cost for each in before.costs}
    for each in after.costs:
        if each.worker == busier:
            assert each.cost >= costs[busier]
        else:
            assert each.cost == costs[each.worker]


def test_a_prefix_is_not_followed_into_a_queue_while_others_have_places() -> None:
    ledger, policy = Ledger(), POLICIES[DEFAULT]()
    ledger.index.apply(KvChanges("a", 1, stored=pack(range(128))))
    candidates = [worker(lease, places=4) for lease in "abc"]
    given_to = Counter(take(policy, asking(str(n), range(128)), ledger, candidates) for n in range(12))
    assert given_to == {"a": 4, "b": 4, "c": 4}
    given_to += Counter(take(policy, asking(str(n), range(128)), ledger, candidates) for n in range(12, 60))
    assert max(given_to.values()) - min(given_to.values()) <= 1


def test_a_slow_worker_is_left_for_one_that_has_to_compute_more() -> None:
    slow = Load(rates=EngineRates(prefill_s_per_token=1e-2, step_s=0.5))
    fast = Load(rates=EngineRates(prefill_s_per_token=1e-5, step_s=0.01))
    ledger, policy = Ledger(), POLICIES[DEFAULT]()
    ledger.index.apply(KvChanges("a", 1, stored=pack(range(20))))
    assert take(policy, asking("r", range(20)), ledger, [worker("a", slow), worker("b", fast)]) == "b"


def test_the_parts_of_a_time_are_its_sum() -> None:
    ledger = Ledger()
    ledger.charge("f", "other", "a", 500, NOW)
    choice = POLICIES[DEFAULT]().choose(asking("r", range(20)), [worker("a", places=1), worker("b")], ledger, NOW)
    assert choice is not None
    for each in choice.costs:
        assert each.place_s is not None
        assert each.prefill_s is not None
        assert each.step_s is not None
        assert each.cost == pytest.approx(each.place_s + each.prefill_s + each.step_s)
        assert (each.place_s > 0) == (each.worker == "a")


def test_a_request_goes_to_its_prefix() -> None:
    policy = POLICIES[DEFAULT]()
    for lease in WORKERS:
        ledger = Ledger()
        ledger.index.apply(KvChanges(lease, 1, stored=pack(range(5))))
        assert take(policy, asking("r", range(8)), ledger) == lease


def test_a_burst_of_one_prefix_is_computed_once_until_its_worker_is_behind() -> None:
    ledger, policy = Ledger(), POLICIES[DEFAULT]()
    first = take(policy, asking("0", range(100)), ledger)
    assert [take(policy, asking(str(number), range(100)), ledger) for number in (1, 2)] == [first, first]


def test_a_burst_of_one_prefix_does_not_pile_up_on_one_worker() -> None:
    ledger, policy = Ledger(), POLICIES[DEFAULT]()
    given_to = Counter(take(policy, asking(str(number), range(100)), ledger) for number in range(100))
    assert set(given_to) == set(WORKERS)


def test_a_burst_of_different_prefixes_spreads() -> None:
    ledger, policy = Ledger(), POLICIES[DEFAULT]()
    given_to = Counter(take(policy, asking(str(n), range(n * 10, n * 10 + 10)), ledger) for n in range(40))
    assert max(given_to.values()) - min(given_to.values()) <= 1


def test_where_load_decides_the_best_holder_is_named_for_a_pull() -> None:
    ledger, policy = Ledger(), POLICIES[DEFAULT]()
    ledger.index.apply(KvChanges("a", 1, stored=pack(range(40))))
    ledger.charge("f", "long", "a", 100_000, NOW)
    choice = policy.choose(asking("r", range(40)), [worker("a"), worker("b")], ledger, NOW)
    assert choice is not None
    assert (choice.worker, choice.cached, choice.pull_from) == ("b", 0, "a")


def test_the_lot_is_drawn_alike_for_one_request_and_otherwise_for_another() -> None:
    policy, candidates = POLICIES["random"](), [worker(lease) for lease in WORKERS]
    drawn = [policy.choose(asking(str(number)), candidates, Ledger(), NOW) for number in range(400)]
    assert all(drawn)
    counts = Counter(choice.worker for choice in drawn if choice)
    assert min(counts[lease] for lease in WORKERS) > 60


def test_round_robin_takes_turns_whatever_the_size() -> None:
    ledger, policy = Ledger(), POLICIES["round-robin"]()
    order = [take(policy, asking(str(number), tokens=1 + number * 100), ledger) for number in range(8)]
    assert order[:4] == order[4:]
    assert sorted(order[:4]) == list(WORKERS)


def test_freeness_counts_requests_that_the_reported_load_does_not_contain_yet() -> None:
    ledger, policy = Ledger(), POLICIES["freeness"]()
    measured = Load(running=1, waiting=0, kv_usage=0.1, at=NOW - 0.1, head_tokens=0)
    busier = Load(running=2, waiting=0, kv_usage=0.3, at=NOW - 0.1, head_tokens=0)
    candidates = [worker("a", measured), worker("b", busier), worker("c")]
    first = policy.choose(asking("r", tokens=8000), candidates, ledger, NOW)
    assert first is not None
    assert first.worker == "a"
    ledger.charge("f", "r", "a", 12_000, NOW)
    second = policy.choose(asking("s", tokens=8000), candidates, ledger, NOW)
    assert second is not None
    assert second.worker == "b"


events: st.SearchStrategy[tuple[str, int, str, list[int]]] = st.one_of(
    st.tuples(st.just("assigned"), st.integers(0, 5), st.sampled_from(WORKERS), contexts),
    st.tuples(st.just("first token"), st.integers(0, 5), st.just(""), st.just([])),
    st.tuples(st.just("ended"), st.integers(0, 5), st.just(""), st.just([])),
)


@pytest.mark.parametrize("policy", _ALL, ids=lambda policy: type(policy).__name__)
@given(st.lists(events, max_size=15), st.lists(st.booleans(), min_size=15, max_size=15), contexts, st.randoms())
def test_routers_that_know_the_same_choose_alike(
    policy: RoutingPolicy,
    history: list[tuple[str, int, str, list[int]]],
    own: list[bool],
    blocks: list[int],
    random: Random,
) -> None:
    """One router makes some of the assignments itself, and hears of the others later; a second one hears of all, those
    of different frontends in any order; a third one has restarted, and knows what frontends report."""
    one, other, restarted = Ledger(), Ledger(), Ledger()
    heard: dict[str, list[tuple[str, int, str, list[int], int]]] = {"f": [], "g": []}
    assigned: set[int] = set()
    for at, ((what, number, lease, keys), mine) in enumerate(zip(history, own, strict=False), 1):
        if what == "assigned":
            assigned.add(number)
        elif number not in assigned:
            continue
        heard["fg"[number % 2]].append((what, number, lease, keys, at))
        if what == "assigned" and mine:
            one.charge("fg"[number % 2], str(number), lease, len(keys) * BLOCK, blocks=pack(keys), order=at)
    for ledger in (one, other):
        waiting = {frontend: list(reversed(messages)) for frontend, messages in heard.items()}
        while frontends := [frontend for frontend, messages in waiting.items() if messages]:
            frontend = random.choice(frontends)
            what, number, lease, keys, told_at = waiting[frontend].pop()
            if what == "assigned":
                charge = Charge(str(number), lease, len(keys) * BLOCK, order=told_at)
                ledger.take_over(frontend, charge, blocks=pack(keys))
            elif what == "first token":
                ledger.prefilled(frontend, str(number))
            else:
                ledger.release(frontend, str(number))
    candidates = [worker(lease) for lease in WORKERS]
    request = asking("r", blocks)
    choice = policy.choose(request, candidates, other, NOW)
    assert choice == policy.choose(request, candidates, one, NOW)
    for frontend in "fg":
        restarted.settle(frontend, other.of_frontend(frontend), since=0.0)
    assert {lease: (restarted.outstanding(lease), restarted.uncached(lease)) for lease in WORKERS} == {
        lease: (other.outstanding(lease), other.uncached(lease)) for lease in WORKERS
    }
