from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_local.engine.vllm.kv.partial_block import find_partial_block

SIZE = 4
CONTEXT = list(range(100, 111))
"""Two full blocks, and three tokens behind them."""
HASHES = [b"first", b"second"]
REST = CONTEXT[8:]


def running(**changes: Any) -> Any:
    """A request with KV of all its tokens."""
    fields = {
        "request_id": "r",
        "block_hashes": HASHES,
        "all_token_ids": CONTEXT,
        "num_computed_tokens": len(CONTEXT),
    }
    return SimpleNamespace(**{**fields, **changes})


def scheduler_of(*requests: Any) -> Any:
    blocks = {request.request_id: [10, 11, 12] for request in requests}
    return SimpleNamespace(
        running=list(requests),
        requests={request.request_id: request for request in requests},
        blocks=blocks,
        kv_cache_manager=SimpleNamespace(get_block_ids=lambda name: (blocks.get(name, []),)),
    )


def found(scheduler: Any, rest: list[int] = REST) -> tuple[int, int] | None:
    tail = find_partial_block(scheduler, SIZE, HASHES, rest)
    return None if tail is None else (tail.block, tail.tokens)


def test_a_running_request_has_what_is_behind_its_full_blocks() -> None:
    assert found(scheduler_of(running())) == (12, 3)


def test_one_that_has_come_further_has_it_too() -> None:
    further = running(block_hashes=[*HASHES, b"third"], all_token_ids=[*CONTEXT, 111, 112, 113], num_computed_tokens=13)
    assert found(scheduler_of(further)) == (12, 3)


@pytest.mark.parametrize(("computed", "tokens"), [(8, None), (9, (12, 1)), (11, (12, 3))])
def test_what_is_not_computed_is_not_there(computed: int, tokens: tuple[int, int] | None) -> None:
    assert found(scheduler_of(running(num_computed_tokens=computed))) == tokens


def test_only_what_both_have_in_common_is_there() -> None:
    assert found(scheduler_of(running(all_token_ids=[*CONTEXT[:10], 7]))) == (12, 2)
    assert found(scheduler_of(running(all_token_ids=[*CONTEXT[:8], 7, 109, 110]))) is None


def test_tokens_behind_another_context_are_others() -> None:
    assert found(scheduler_of(running(block_hashes=[HASHES[0], b"other"]))) is None
    assert found(scheduler_of(running(block_hashes=HASHES[:1]))) is None


def test_the_one_that_has_it_is_found_among_others() -> None:
    others = [running(request_id="a", block_hashes=[b"x", b"y"]), running(request_id="b", num_computed_tokens=8)]
    assert found(scheduler_of(*others, running())) == (12, 3)


@pytest.mark.parametrize("rest", [[], CONTEXT[4:8], CONTEXT])
def test_a_tail_is_a_part_of_a_block(rest: list[int]) -> None:
    assert found(scheduler_of(running()), rest) is None


def test_without_a_full_block_there_is_no_telling_whose_it_is() -> None:
    assert find_partial_block(scheduler_of(running()), SIZE, [], REST) is None


def test_it_stands_as_long_as_its_request_has_it() -> None:
    request = running()
    scheduler = scheduler_of(request)
    tail = find_partial_block(scheduler, SIZE, HASHES, REST)
    assert tail is not None
    assert tail.stands()
    request.num_computed_tokens += 20
    assert tail.stands()
    # Preempted.
    request.num_computed_tokens = 0
    assert not tail.stands()
    # Resumed, in other blocks.
    request.num_computed_tokens = len(CONTEXT)
    scheduler.blocks["r"] = [10, 11, 13]
    assert not tail.stands()


def test_it_is_not_vouched_for_once_its_request_is_over() -> None:
    scheduler = scheduler_of(running())
    tail = find_partial_block(scheduler, SIZE, HASHES, REST)
    scheduler.requests.clear()
    assert tail is not None
    assert not tail.stands()
    # Another one of that name.
    scheduler.requests["r"] = running()
    assert not tail.stands()
