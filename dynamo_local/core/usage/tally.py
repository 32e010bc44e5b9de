"""The tokens that one HTTP request has used, counted as they come. Pure.

A request may be many to the engines: several prompts, n choices of each, a turn for each call of a tool. A prompt
counts once, however many choices it has, and from its first output on: what is given up before that has used nothing.
Output counts as vLLM counts it in the `usage` of its answers, whether or not the client has waited for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec


class Counted(msgspec.Struct, frozen=True, array_like=True):
    """What was counted of a request in records of its use so far. `requests`: 1 once it was counted itself."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0


@dataclass(slots=True)
class Tally:
    """Tokens used so far. `cached` of the `prompt` tokens were in a worker's KV cache; of several choices of a prompt,
    as the first to come had it. `running`: requests that engines have, and that have not ended by themselves."""

    prompt: int = 0
    cached: int = 0
    output: int = 0
    running: int = 0
    _prompts: set[str] = field(default_factory=set)

    @property
    def total(self) -> int:
        """Tokens of prompts and outputs together."""
        return self.prompt + self.output

    def begin(self) -> None:
        """Note that engines have one more request of it."""
        self.running += 1

    def end(self) -> None:
        """Note that such a request has ended by itself."""
        self.running -= 1

    def add(self, prompt_id: str, prompt: int, cached: int, output: int) -> None:
        """Count an output of so many tokens. `prompt` and `cached` are of the prompt that it belongs to, which counts
        with its first output."""
        if prompt_id not in self._prompts:
            self._prompts.add(prompt_id)
            self.prompt += prompt
            self.cached += min(cached, prompt)
        self.output += output

    def replace(self, prompt: int, output: int) -> None:
        """Take over what the client was told, where engines compute more than an answer has."""
        self.prompt, self.output = prompt, output
        self.cached = min(self.cached, prompt)
