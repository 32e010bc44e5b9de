"""Command lines of NVIDIA Dynamo's `dynamo serve` (v0.2 and v0.3): values after a space, its own options, its port.

Source: https://github.com/ai-dynamo/dynamo, docs/guides/planner_benchmark and deploy/sdk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dynamo_local.core.errors import ConfigError, UsageError

REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "--enable-local-planner": "use --Planner.no-operation=false: the example graphs have a planner",
        "--working-dir": "change to that folder first",
        "--service-name": "leave it out: a process for each service is started",
        "--depends": "leave it out: each process finds the others itself",
        "--enable-system-app": "leave it out: see `dynamo ps` and GET /health",
    }
)
"""Options of Dynamo that are not taken, each with what to do instead."""


def checked(arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments. Raises UsageError if an option of Dynamo's is among them that is not taken."""
    for argument in arguments:
        if (name := argument.partition("=")[0]) in REMEDIES:
            raise UsageError(f"there is no option {name}", REMEDIES[name])
    return arguments


def join_values(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments with `--Service.key VALUE` written as `--Service.key=VALUE`.

    Only after the target: before it, `--Service.key TARGET` is a switch and the target.
    """
    joined: list[str] = []
    target = False
    for argument in arguments:
        last = joined[-1] if joined else ""
        if not argument.startswith("-") and target and last.startswith("--") and "." in last and "=" not in last:
            joined[-1] = f"{last}={argument}"
            continue
        target = target or not argument.startswith("-")
        joined.append(argument)
    return tuple(joined)


def port_in(config: Path | None, overrides: Iterable[str]) -> int | None:
    """Return the Frontend.port that options or file give, options first; None if neither does. Raises ConfigError."""
    from dynamo_local.sdk.config.yaml_source import read_yaml

    prefix = "--Frontend.port="
    typed = [option.removeprefix(prefix) for option in overrides if option.startswith(prefix)]
    if typed:
        return _port(int(typed[-1]) if typed[-1].isdecimal() else typed[-1], prefix.rstrip("="))
    tree = read_yaml(config) if config is not None else None
    section = tree.get("Frontend") if isinstance(tree, Mapping) else None
    given = section.get("port") if isinstance(section, Mapping) else None
    return None if given is None else _port(given, f"{config}: Frontend.port")


def _port(value: Any, origin: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 65535:
        raise ConfigError(f"{origin} is {value!r}", "write a port from 0 to 65535")
    return value
