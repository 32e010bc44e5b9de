"""A worker's settings for a vLLM engine that are not vLLM's own, and LoRA adapters. Known without importing vLLM."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import msgspec

from dynamo_local.core.errors import ConfigError


@dataclass(frozen=True)
class VllmSettings:
    """Settings of a worker with vLLM for its engine."""

    cpu_tuning: bool = field(
        default=True,
        metadata={
            "help": "Whether an engine's processes sleep while they wait for each other, keep to the cores of their "
            "slots, and have no threads without work. With false they run as vLLM, PyTorch and NIXL have it."
        },
    )
    prepared_weights: bool = field(
        default=True,
        metadata={
            "help": "Whether a process is kept that has loaded the model's weights, so that further workers start "
            "without loading them. CPU only, and only where memory allows: the weights are there once more."
        },
    )
    trust_local_users: bool = field(
        default=False,
        metadata={
            "help": "Whether kv-transfer on GPUs may open a port through which any user of this machine "
            "can write the memory of the engine."
        },
    )


# Configured LoRA adapters. Frontend and workers read the same configuration, in vLLM's format (`--lora-modules
# name=path`); requests carry a name only.

ListAdapters = Callable[[], tuple[Hashable, Mapping[str, str]]]
"""Adapters that a worker loads when a request asks for one: a version of the list, which differs after each change, and
folders by name."""

_Text = Annotated[str, msgspec.Meta(min_length=1)]


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Entry of `lora-modules`. `path` is a folder, or a Hugging Face id."""

    name: _Text
    path: _Text
    base_model_name: str | None = None
    is_3d_lora_weight: bool = False


@dataclass(frozen=True)
class AdapterSettings:
    """Settings of vLLM that name adapters. Raises ConfigError."""

    enable_lora: bool | None = None
    lora_modules: list[Any] | None = None

    def __post_init__(self) -> None:
        names = [adapter.name for adapter in self.adapters]
        if names and not self.enable_lora:
            raise ConfigError("lora-modules needs enable-lora", "set enable-lora: true wherever lora-modules is set")
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"lora-modules names {', '.join(sorted(twice))} twice", "give each adapter its own name")

    @cached_property
    def adapters(self) -> tuple[Adapter, ...]:
        return tuple(map(_adapter, self.lora_modules or ()))


def _adapter(given: Any) -> Adapter:
    try:
        if not isinstance(given, str):
            return msgspec.convert(given, Adapter)
        name, equals, path = given.partition("=")
        if equals and "," not in given:
            return msgspec.convert({"name": name, "path": path}, Adapter)
        return msgspec.json.decode(given, type=Adapter)
    except msgspec.DecodeError as error:
        raise ConfigError(f"lora-modules: {given!r} names no adapter ({error})", "write name=path") from error
