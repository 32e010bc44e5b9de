"""Requests move between workers with real vLLM, as clients and operators see it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import openai
import pytest

from dynamo_local.core.errors import UsageError
from state.machine.processes import start_time
from tests.e2e.llm_server import PATIENCE_S, LlmServer, none_of, settled
from tests.e2e.streams import TAIL, WORKERS, Stream, begin, migrate, prompt, requests, samples
from tests.integration.server_process import eventually

MOST = 4000
"""Tokens of a stream that is ended by its test: more than come while it does what it is for."""
TOKENS = 400
BLOCK_SIZE = 32
"""As examples/llm/configs/agg_router.yaml has it."""


def other(worker: str) -> str:
    (found,) = set(WORKERS) - {worker}
    return found


LENGTHS = [20, 300, 1500, 4000]
GREEDY: dict[str, Any] = {}
EXACT: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"stop": ["arbiterarbiter"], "min_tokens": 20},
    {"repetition_penalty": 1.3},
    {"logit_bias": {"65": 4.0, "66": -4.0}},
]


def movable() -> list[tuple[dict[str, Any], int]]:
    return [(GREEDY, length) for length in LENGTHS] + [(options, 300) for options in EXACT]


def stream(api: openai.OpenAI, options: dict[str, Any], length: int, salt: str, tokens: int = MOST) -> Stream:
    return Stream(api, prompt(length), tokens, {"temperature": 0, **options}, salt)


def ended(streams: Sequence[Stream], reading: Sequence[Future[dict[int, list[Any]]]]) -> list[dict[int, list[Any]]]:
    """What the streams have brought, some tokens from now on included."""
    for each in streams:
        each.enough.set()
    return [each.result() for each in reading]


def assert_undisturbed(streams: Sequence[Stream], answers: Sequence[dict[int, list[Any]]]) -> None:
    """They have brought what they bring when they are left alone."""
    alone: dict[str, Stream] = {}
    for each, answer in zip(streams, answers, strict=True):
        tokens = max(len(answer[0][0]), alone[key(each)].tokens if key(each) in alone else 0)
        alone[key(each)] = Stream(each.client, each.prompt, tokens, each.options, "alone")
    with ThreadPoolExecutor(4) as pool:
        right = dict(zip(alone, pool.map(Stream.read, alone.values()), strict=True))
    for each, answer in zip(streams, answers, strict=True):
        tokens, logprobs, text, _ = answer[0]
        its_tokens, its_logprobs, its_text, _ = right[key(each)][0]
        assert tokens == its_tokens[: len(tokens)]
        assert text == its_text[: len(text)]
        assert logprobs == pytest.approx(its_logprobs[: len(logprobs)], abs=1e-3)


def key(stream: Stream) -> str:
    """The same for streams that are to bring the same."""
    return f"{stream.options} {len(stream.prompt)}"


def moves(api: openai.OpenAI, outcome: str, reason: str) -> int:
    return round(sum(samples(api, "dynamo_migrations_total", f'outcome="{outcome}",reason="{reason}"')))


async def test_moved_streams_bring_the_same_tokens(pair: LlmServer, api: openai.OpenAI) -> None:
    streams = [stream(api, options, length, "migrated") for options, length in movable()]
    with ThreadPoolExecutor(len(streams)) as pool:
        reading = [begin(pool, each) for each in streams]
        results = [result for worker in WORKERS for result in migrate(pair, worker)]
        answers = ended(streams, reading)
    assert {result["request"] for result in results} == {each.id for each in streams}
    assert any(result["outcome"] == "migrated" for result in results)
    assert_undisturbed(streams, answers)
    await pair.until(settled, "blocks are still held or pinned")


def moved_by_hand(pair: LlmServer, request: str, *, to: str) -> dict[str, Any]:
    """Whoever has other things to do just then may refuse; the request stays where it is, and is asked again."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        (result,) = json.loads(pair.command("migrate", request, "--to", to, "--json"))
        if result["outcome"] != "stayed":
            return dict(result)
        assert time.monotonic() < deadline, result


async def test_a_request_is_moved_by_the_beginning_of_its_id(pair: LlmServer, api: openai.OpenAI) -> None:
    moving = stream(api, {}, 300, "by hand")
    with ThreadPoolExecutor(1) as pool:
        reading = begin(pool, moving)
        (row,) = json.loads(pair.command("requests", "--json"))["requests"]
        assert (row["request"], row["prompt_tokens"], row["stays"]) == (moving.id, 300, None)
        target = other(row["worker"])
        result = moved_by_hand(pair, moving.id[:-3], to=target)
        assert (result["request"], result["outcome"], result["worker"]) == (moving.id, "migrated", target)
        (after,) = requests(pair)
        assert (after["worker"], after["epoch"]) == (target, row["epoch"] + 1)
        answers = ended([moving], [reading])
    assert_undisturbed([moving], answers)


def test_unseeded_sampling_goes_on_in_each_choice(pair: LlmServer, api: openai.OpenAI) -> None:
    drawn = stream(api, {"temperature": 1.0, "n": 2}, 300, "drawn")
    with ThreadPoolExecutor(1) as pool:
        reading = begin(pool, drawn)
        results = [result for worker in WORKERS for result in migrate(pair, worker)]
        tokens = sum(row["tokens"] for row in requests(pair))
        (choices,) = ended([drawn], [reading])
    assert any(result["outcome"] == "migrated" for result in results)
    assert sum(len(choice[0]) for choice in choices.values()) >= tokens
    assert min(len(choice[0]) for choice in choices.values()) > TAIL
    assert len(choices) == 2


@pytest.fixture
def unbalanced(pair: LlmServer) -> Iterator[LlmServer]:
    """The pair, in which rebalancing is switched off in the end."""
    yield pair
    configure(pair, rebalance=0)


def configure(pair: LlmServer, **values: int) -> None:
    for name, value in values.items():
        pair.command("config", "set", name.replace("_", "-"), str(value))


async def test_streams_of_one_worker_are_levelled(unbalanced: LlmServer, api: openai.OpenAI) -> None:
    """Of two workers with the same cache M, one with four small streams has M / 4 steps left, an idle one M."""
    tokens = round(samples(api, "dynamo_worker_kv_blocks")[0]) * BLOCK_SIZE
    configure(unbalanced, rebalance_below=tokens // 3, rebalance_above=tokens // 2, rebalance_period_s=0)
    before = moves(api, "migrated", "rebalance")
    streams = [stream(api, {}, 300, f"levelled {n}") for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        reading = [begin(pool, each) for each in streams]
        eventually(lambda: all_on(unbalanced, WORKERS[0]), "they do not go to one worker", PATIENCE_S)
        configure(unbalanced, rebalance=1)
        # With two each, neither is below the range.
        eventually(lambda: set(spread(unbalanced).values()) == {2}, "they are not levelled", PATIENCE_S)
        eventually(lambda: moves(api, "migrated", "rebalance") - before >= 2, "not by moves", PATIENCE_S)
        answers = ended(streams, reading)
    assert_undisturbed(streams, answers)
    await unbalanced.until(settled, "blocks are still held or pinned")


def spread(pair: LlmServer) -> Counter[str]:
    """How many requests each worker has."""
    return Counter(row["worker"] for row in requests(pair))


def all_on(pair: LlmServer, worker: str) -> bool:
    """Whether it has all requests; those of the other one are sent there."""
    with suppress(UsageError):  # a busy one may not be ready for a moment
        migrate(pair, other(worker), to=worker)
    return set(spread(pair)) == {worker}


async def test_a_worker_is_drained_under_load_and_no_stream_notices(pair: LlmServer, api: openai.OpenAI) -> None:
    lengths = LENGTHS * 2
    streams = [stream(api, GREEDY, length, f"drained {n}") for n, length in enumerate(lengths)]
    with ThreadPoolExecutor(len(streams)) as pool:
        reading = [begin(pool, each) for each in streams]
        ((watcher, _),) = spread(pair).most_common(1)
        drained = pair.pid(watcher.removeprefix("pair_"))
        started = start_time(drained)
        assert started is not None
        os.kill(drained, signal.SIGTERM)
        # It goes when its streams have gone.
        eventually(lambda: none_of({drained: started}), "the worker stays", PATIENCE_S)
        answers = ended(streams, reading)
    assert_undisturbed(streams, answers)
    assert moves(api, "migrated", "drain") > 0
    pair.await_workers(2)
    await pair.until(settled, "blocks are still held or pinned")


@pytest.mark.ends_server
def test_streams_end_where_they_are_when_the_server_ends(pair: LlmServer, api: openai.OpenAI) -> None:
    tree = pair.tree()
    with ThreadPoolExecutor(2) as pool:
        reading = [begin(pool, stream(api, {}, 300, f"last {n}", TOKENS)) for n in range(2)]
        pair.signal(signal.SIGTERM)
        for each in reading:
            ((tokens, *_),) = each.result().values()
            assert len(tokens) == TOKENS
    assert pair.end(PATIENCE_S) == 0
    assert none_of(tree)
