"""Whether each token of a greedy answer is the greedy one given its prefix, or nearly. Pure.

In bfloat16 the same prompt has several right greedy answers: vLLM rounds otherwise at another batch size, and where
two tokens are nearly as likely, the other one comes. From there on the texts differ. A comparison with an undisturbed
answer would call that an error. One prefill of prompt and answer tells for each position how likely the token was,
and how likely the likeliest one: the difference of their log-probabilities, the gap, is 0 or what rounding makes of
it. A token that comes from a wrong KV cache, is lost or comes twice, has a gap of several nats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NEARLY_NAT = 0.5
"""The widest gap of a right token. Undisturbed streams show 0.25 (docs/internals/fidelity.md)."""


@dataclass(frozen=True)
class Verdict:
    """The judgement of an answer. `gaps`: in nats, one for each token."""

    gaps: tuple[float, ...]

    @property
    def wrong(self) -> tuple[int, ...]:
        """Positions of tokens that are not the greedy ones."""
        return tuple(at for at, gap in enumerate(self.gaps) if gap > NEARLY_NAT)


def judge(prompt_logprobs: Sequence[Mapping[str, Any] | None], tokens: Sequence[int]) -> Verdict:
    """Judge the tokens at the end of a prompt by its `prompt_logprobs`, as vLLM's API gives them: for each position a
    mapping from token id to `logprob`, with the token that stands there and the likeliest one. The first position has
    none; so the prompt has to have a token before the answer. Raises ValueError if there is none."""
    if len(prompt_logprobs) <= len(tokens):
        raise ValueError(f"{len(prompt_logprobs)} positions for {len(tokens)} tokens and what comes before them")
    gaps: list[float] = []
    for entry, token in zip(prompt_logprobs[len(prompt_logprobs) - len(tokens) :], tokens, strict=True):
        if entry is None:
            raise ValueError("a position without log-probabilities")
        gaps.append(max(each["logprob"] for each in entry.values()) - entry[str(token)]["logprob"])
    return Verdict(tuple(gaps))
