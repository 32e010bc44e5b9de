"""Options that name a key and no service, such as `--max-model-len 4096`. Each is for all services with the key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dynamo_local.core.errors import ConfigError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.sdk.config.overrides import Override
from dynamo_local.sdk.service import ServiceSpec

KV_NETWORK, KV_STREAM = "kv-network", "kv-stream"


@dataclass(frozen=True)
class Flag:
    """An option without a service, with its value as text.

    `path`: the key and, for a part of a mapping, what leads to it. `typed`: the option as the user typed it.
    `beside`: a key that a service must have as well, since keys of other services may have the same name by chance.
    `engines_only`: services without an engine do not get the option, although they have the key.
    """

    path: tuple[str, ...]
    text: str
    typed: str
    beside: str
    engines_only: bool = False


def kv_network_flag(cidr: str | None) -> tuple[Flag, ...]:
    """The option `--kv-network`, if it is given."""
    return () if cidr is None else (Flag((KV_NETWORK,), cidr, f"--{KV_NETWORK}", KV_NETWORK, engines_only=True),)


def kv_stream_flag(*, given: bool) -> tuple[Flag, ...]:
    """The option `--kv-stream`, if it is given."""
    return (Flag((KV_STREAM,), "true", f"--{KV_STREAM}", KV_STREAM, engines_only=True),) if given else ()


def overrides_of(specs: Sequence[ServiceSpec], flags: Sequence[Flag]) -> Iterator[Override]:
    """Yield the flags as options of the services that take them. Raises ConfigError if no service takes one."""
    for flag in flags:
        takers = [spec for spec in specs if {flag.path[0], flag.beside} <= set(spec.schema.keys())]
        engines = [spec for spec in takers if spec.role in ENGINE_ROLES]
        if not takers:
            raise ConfigError(f"{flag.typed}: no service of the graph has this setting", "leave it out")
        for spec in engines if flag.engines_only and engines else takers:
            yield Override(spec.name, flag.path, flag.text, flag.typed)
