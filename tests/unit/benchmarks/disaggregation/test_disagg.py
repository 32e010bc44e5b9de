"""What a turn of the benchmark of disaggregation says of its records."""

from __future__ import annotations

import pytest

from benchmarks.disaggregation.disagg import APART, TOGETHER, _report, best_chunk
from benchmarks.disaggregation.mixed_load import EngineTimes, EngineView, Turn
from benchmarks.harness.accounting import Usage
from dynamo_local.core.messages.work import TokenBatch, TokenDelta
from dynamo_local.load.figures import Record

USED = Usage({"frontend": 1.0, "client": 0.5}, busy_s=2.0, stolen_s=0.0, at=4.0)


def record(*chunks_s: float, tokens: int = 0, error: str = "") -> Record:
    return Record(0.0, 8, 8, sent_s=0.0, chunks_s=list(chunks_s), ended_s=chunks_s[-1], tokens=tokens, error=error)


def turn(gap_s: float, ttft_s: float = 1.0) -> Turn:
    decode = record(0.0, gap_s, 2 * gap_s, tokens=6)
    return Turn((decode,), (record(ttft_s, 4.0, tokens=2),), USED, 2.0, EngineView(tokens=8, stream_tokens=6))


def test_gaps_are_of_the_decodes_and_first_tokens_of_the_long_prompts() -> None:
    found = turn(0.25, ttft_s=1.5)
    assert found.gaps_s == [0.25, 0.25]
    assert found.ttfts_s == [1.5]
    assert found.tokens_per_s == 8 / 2.0
    assert found.tokens_per_chunk == 2.0


def test_what_came_after_the_last_long_prompt_does_not_count() -> None:
    found = Turn((record(0.0, 0.5, 2.5, 3.0),), (), USED, 2.0)
    assert found.gaps_s == [0.5]


def test_failures_of_both_kinds_of_requests_are_told() -> None:
    found = Turn((record(0.1, error="timeout"),), (record(0.2, error="HTTP 500"),), USED, 2.0)
    assert [why.partition(":")[0] for why in found.failures] == ["timeout", "HTTP 500"]


def test_ratios_above_one_speak_for_disaggregation(capsys: pytest.CaptureFixture[str]) -> None:
    figures = _report({TOGETHER: [turn(0.3), turn(0.3)], APART: [turn(0.1), turn(0.1)]}, 64)
    assert figures["ratios"]["p99"]["estimate"] == pytest.approx(3.0)
    assert "p99 at the engine" not in figures["ratios"]
    assert "aggregated, chunks of 64" in capsys.readouterr().out


def test_the_best_chunk_size_serves_the_decodes_without_making_long_prompts_wait_much_longer() -> None:
    tried = {16: turn(0.1, ttft_s=3.1), 32: turn(0.2, ttft_s=2.9), 64: turn(0.3, ttft_s=2.0)}
    assert best_chunk(tried) == 32


def test_engine_times_are_of_long_answers_in_the_time_asked_for() -> None:
    times = EngineTimes()
    for index in range(40):
        deltas = [TokenDelta("stream", 1, index, [7])]
        if index < 16:
            deltas.append(TokenDelta("long prompt", 1, index, [7]))
        times.take(TokenBatch("worker", index, tuple(deltas)), 10.0 + index)
    assert times.view(20.0) == EngineView((1.0,) * 20, 21 + 16, 21)
    assert times.view(20.0) == EngineView()
