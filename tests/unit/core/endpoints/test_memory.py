"""Memory that endpoints hold, and what goes when there is too little."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.endpoints.memory import Holding, explained, weights_to_give_up, worker_bytes
from dynamo_local.core.errors import MemoryShortError

GIB = 2**30


def test_a_worker_does_not_load_what_is_loaded_already() -> None:
    assert worker_bytes(3 * GIB, GIB) == 2 * GIB
    assert worker_bytes(None, GIB) is None


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.integers(1, 100)), st.integers(1, 300))
def test_as_few_weights_go_as_are_enough(unused: dict[str, int], missing: int) -> None:
    chosen = weights_to_give_up(unused, missing)
    if sum(unused.values()) < missing:
        assert chosen == ()
        return
    sizes = [unused[key] for key in chosen]
    assert sum(sizes) >= missing
    assert sum(sizes) - min(sizes) < missing
    assert len(chosen) <= len(unused)


def test_the_refusal_says_who_holds_how_much() -> None:
    short = MemoryShortError("0.5 GiB of memory is free, and 1 more worker needs 2.0 GiB", "end", 3 * GIB // 2)
    found = explained(short, [Holding("a", GIB), Holding("b", None, GIB), Holding("c", 0, 2 * GIB), Holding("d")])
    assert str(found) == (
        "0.5 GiB of memory is free, and 1 more worker needs 2.0 GiB; 1.5 GiB would have to go: "
        "endpoint c holds 2.0 GiB of weights for its next worker, endpoint a holds 1.0 GiB, "
        "endpoint b holds an unknown amount and 1.0 GiB of weights for its next worker; "
        "lower the workers of one, delete it, or end other programs"
    )
    assert explained(short, [Holding("d")]) is short
