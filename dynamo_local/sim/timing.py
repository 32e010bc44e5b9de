"""Models of how long an engine's steps take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dynamo_local.engine.mocker.sequence import StepOutcome
from dynamo_local.engine.mocker.settings import MockerSettings


@dataclass(frozen=True)
class StepWork:
    """Work of a step: tokens of prompts, and the requests that decode, with their contexts' tokens together."""

    prefill_tokens: int
    decode_seqs: int
    context_tokens: int


def work_of(outcome: StepOutcome) -> StepWork:
    """Work of a step that the scheduler has begun."""
    prefill, seqs, context = 0, 0, 0
    for sequence, count in outcome.computed.items():
        if count == 1 and sequence.drawn:
            seqs += 1
            context += sequence.length
        else:
            prefill += count
    return StepWork(prefill, seqs, context)


class Timing(Protocol):
    def step_s(self, work: StepWork) -> float:
        """Time of a step, in seconds."""

    def decode_s(self, work: StepWork, steps: int) -> float:
        """Time of so many steps in which the same requests decode, each a token a step, from `work` on, in seconds."""


@dataclass(frozen=True)
class MockerTiming:
    """The mocker's own model."""

    settings: MockerSettings

    def step_s(self, work: StepWork) -> float:
        return self.settings.step_s(work.prefill_tokens, work.decode_seqs)

    def decode_s(self, work: StepWork, steps: int) -> float:
        return steps * self.step_s(work)


@dataclass(frozen=True)
class DynamoTiming:
    """The default model of Dynamo's simulator (ai-dynamo 1.6.1), found by single requests and pairs of them: to five
    digits, a step takes a quadratic function of the prompt tokens that it computes, plus one of the share of the KV
    cache that the decoding requests' contexts fill."""

    cache_tokens: int

    def step_s(self, work: StepWork) -> float:
        prefill = work.prefill_tokens
        taken_ms = 4.209989e-07 * prefill**2 + 1.518344e-02 * prefill + 16.50142 if prefill else 0.0
        return taken_ms / 1e3 + (self.decode_s(work, 1) if work.decode_seqs else 0.0)

    def decode_s(self, work: StepWork, steps: int) -> float:
        first, more = work.context_tokens / self.cache_tokens, work.decode_seqs / self.cache_tokens
        sum_of_steps, sum_of_squares = steps * (steps - 1) / 2, (steps - 1) * steps * (2 * steps - 1) / 6
        shares = steps * first + more * sum_of_steps
        squares = steps * first**2 + 2 * first * more * sum_of_steps + more**2 * sum_of_squares
        return (-25.74 * squares + 54.01 * shares + 5.74 * steps) / 1e3
