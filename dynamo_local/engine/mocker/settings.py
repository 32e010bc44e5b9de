"""The mocker's settings, as keys of the worker service beside vLLM's own (hence the prefix)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from dynamo_local.core.errors import ConfigError


def _setting(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
) -> Any:
    return field(default=default, metadata={"help": help, "at_least": at_least, "at_most": at_most, "above": above})


@dataclass(frozen=True)
class MockerSettings:
    """Size of the pretended cache, limits of the scheduler, and the model of time. Raises ConfigError."""

    mocker_kv_blocks: int = _setting(1024, "Size of the KV cache, in blocks.", at_least=1)
    mocker_block_size: int = _setting(32, "Number of tokens in a KV block.", at_least=1)
    mocker_prefix_caching: bool = _setting(
        True, "Whether free blocks keep their content for prefix caching until they are needed."
    )
    mocker_max_num_seqs: int = _setting(64, "Maximum number of requests that run at the same time.", at_least=1)
    mocker_max_num_batched_tokens: int = _setting(
        2048, "Maximum number of tokens computed in one step. A longer prompt is prefilled in chunks.", at_least=1
    )
    mocker_max_model_len: int = _setting(
        8192, "Maximum context (prompt and output) in tokens, bounded by the size of the KV cache.", at_least=2
    )
    mocker_vocab_size: int = _setting(256, "Size of the vocabulary: token ids are below it.", at_least=1, at_most=2**31)
    mocker_step_base_ms: float = _setting(8.0, "Fixed duration of a step, in ms.", at_least=0)
    mocker_prefill_us_per_token: float = _setting(
        50.0, "Duration that each prompt token adds to a step, in us.", at_least=0
    )
    mocker_decode_us_per_seq: float = _setting(
        100.0, "Duration that each decoding request adds to a step, in us.", at_least=0
    )
    mocker_transfer_base_ms: float = _setting(
        2.0, "Fixed duration of a transfer of KV blocks from another engine, in ms.", at_least=0
    )
    mocker_transfer_us_per_block: float = _setting(
        160.0, "Duration that each block adds to a transfer, in us. The default is 4 MiB at 25 GiB/s.", at_least=0
    )
    mocker_max_pinned_share: float = _setting(
        0.5, "Maximum fraction of the KV cache that is kept for other engines to read.", at_least=0, at_most=1
    )
    mocker_longest_pin_s: float = _setting(
        60.0, "Maximum time for which blocks are kept for another engine, in s.", above=0
    )
    mocker_speedup: float = _setting(1.0, "Factor by which steps and transfers are faster than modelled.", above=0)
    mocker_start_s: float = _setting(0.0, "Duration of start-up, in s.", at_least=0)
    mocker_process: bool = _setting(
        False, "Whether the engine depends on a process of its own, as vLLM does, which tests can kill or stop."
    )
    mocker_orders: str = _setting("", "Folder in which tests place orders for failures of running engines.")

    def __post_init__(self) -> None:
        for spec in fields(self):
            if isinstance(getattr(self, spec.name), str):
                continue
            _check(spec.name, getattr(self, spec.name), **{key: spec.metadata[key] for key in _LIMITS})
        if self.mocker_kv_blocks * self.mocker_block_size < 2:
            raise ConfigError("the KV cache holds no request", "raise mocker-kv-blocks or mocker-block-size")

    @property
    def context_limit(self) -> int:
        """Tokens that a request can have, prompt and output."""
        return min(self.mocker_max_model_len, self.mocker_kv_blocks * self.mocker_block_size)

    @property
    def most_pinned(self) -> int:
        """Blocks that can be kept for readers."""
        return int(self.mocker_kv_blocks * self.mocker_max_pinned_share)

    def transfer_s(self, blocks: int) -> float:
        """How long it takes to read so many blocks from another engine, in seconds."""
        modelled = self.mocker_transfer_base_ms / 1e3 + blocks * self.mocker_transfer_us_per_block / 1e6
        return modelled / self.mocker_speedup

    def step_s(self, prefill_tokens: int, decode_seqs: int) -> float:
        """How long a step takes that computes this much, in seconds."""
        variable_us = prefill_tokens * self.mocker_prefill_us_per_token + decode_seqs * self.mocker_decode_us_per_seq
        return (self.mocker_step_base_ms / 1e3 + variable_us / 1e6) / self.mocker_speedup


_LIMITS = ("at_least", "at_most", "above")


def _check(name: str, value: float, *, at_least: float | None, at_most: float | None, above: float | None) -> None:
    key = name.replace("_", "-")
    if not math.isfinite(value):
        raise ConfigError(f"{key} must be finite, not {value}")
    if at_least is not None and value < at_least:
        raise ConfigError(f"{key} must be at least {at_least}, not {value}")
    if at_most is not None and value > at_most:
        raise ConfigError(f"{key} must be at most {at_most}, not {value}")
    if above is not None and value <= above:
        raise ConfigError(f"{key} must be above {above}, not {value}")
