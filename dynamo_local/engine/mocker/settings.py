"""The mocker's settings, as keys of the worker service beside vLLM's own (hence the prefix)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from dynamo_local.core.errors import ConfigError


def _setting(default: Any, help: str, *, at_least: float | None = None, above: float | None = None) -> Any:
    return field(default=default, metadata={"help": help, "at_least": at_least, "above": above})


@dataclass(frozen=True)
class MockerSettings:
    """Size of the pretended cache, limits of the scheduler, and the model of time. Raises ConfigError."""

    mocker_kv_blocks: int = _setting(1024, "KV cache size, in blocks", at_least=1)
    mocker_block_size: int = _setting(32, "tokens in a KV block", at_least=1)
    mocker_max_num_seqs: int = _setting(64, "requests that run at the same time", at_least=1)
    mocker_max_num_batched_tokens: int = _setting(
        2048, "tokens computed in one step; a longer prompt is prefilled in chunks", at_least=1
    )
    mocker_max_model_len: int = _setting(
        8192, "longest context in tokens, prompt and output; never more than the KV cache holds", at_least=2
    )
    mocker_vocab_size: int = _setting(256, "tokens are drawn from 0 up to this", at_least=1)
    mocker_step_base_ms: float = _setting(8.0, "time of a step, whatever it computes, in ms", at_least=0)
    mocker_prefill_us_per_token: float = _setting(50.0, "time that each prompt token adds to a step, in us", at_least=0)
    mocker_decode_us_per_seq: float = _setting(
        100.0, "time that each decoding request adds to a step, in us", at_least=0
    )
    mocker_speedup: float = _setting(1.0, "steps are this many times faster than modelled", above=0)
    mocker_start_s: float = _setting(0.0, "time that start-up takes, in s", at_least=0)

    def __post_init__(self) -> None:
        for spec in fields(self):
            _check(spec.name, getattr(self, spec.name), spec.metadata["at_least"], spec.metadata["above"])
        if self.mocker_vocab_size > 2**31:
            raise ConfigError("mocker-vocab-size must be at most 2147483648")
        if self.mocker_kv_blocks * self.mocker_block_size < 2:
            raise ConfigError("the KV cache holds no request", "raise mocker-kv-blocks or mocker-block-size")

    @property
    def context_limit(self) -> int:
        """Tokens that a request can have, prompt and output."""
        return min(self.mocker_max_model_len, self.mocker_kv_blocks * self.mocker_block_size)

    def step_s(self, prefill_tokens: int, decode_seqs: int) -> float:
        """How long a step takes that computes this much, in seconds."""
        variable_us = prefill_tokens * self.mocker_prefill_us_per_token + decode_seqs * self.mocker_decode_us_per_seq
        return (self.mocker_step_base_ms / 1e3 + variable_us / 1e6) / self.mocker_speedup


def _check(name: str, value: float, at_least: float | None, above: float | None) -> None:
    key = name.replace("_", "-")
    if not math.isfinite(value):
        raise ConfigError(f"{key} must be finite, not {value}")
    if at_least is not None and value < at_least:
        raise ConfigError(f"{key} must be at least {at_least}, not {value}")
    if above is not None and value <= above:
        raise ConfigError(f"{key} must be above {above}, not {value}")
