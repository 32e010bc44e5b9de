"""What endpoints hold of a machine's memory, and what of it would have to go for more of their workers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynamo_local.core.errors import MemoryShortError
from dynamo_local.core.sizing.machine import size


@dataclass(frozen=True)
class Holding:
    """What one endpoint holds, in bytes. `workers`: its processes, None if that is not known. `weights`: the processes
    that keep its weights for further workers."""

    endpoint: str
    workers: int | None = 0
    weights: int = 0


def worker_bytes(engine_bytes: int | None, shared: int) -> int | None:
    """What one more worker takes at most. `shared`: bytes of its weights that are loaded already; 0 if it loads them
    itself."""
    return None if engine_bytes is None else max(engine_bytes - shared, 0)


def weights_to_give_up(unused: Mapping[str, int], missing: int) -> tuple[str, ...]:
    """The kept weights, by key, to give up so that so many bytes more are free: as few as are enough. None if all
    together are not. `unused`: bytes of those whose endpoints have no worker."""
    chosen: list[str] = []
    for key in sorted(unused, key=lambda key: (-unused[key], key)):
        if missing <= 0:
            break
        chosen.append(key)
        missing -= unused[key]
    return tuple(chosen) if missing <= 0 else ()


def explained(short: MemoryShortError, holdings: Sequence[Holding]) -> MemoryShortError:
    """The error with the endpoints that hold memory, largest first, in place of its remedy."""
    lines = [_line(each) for each in sorted(holdings, key=_size, reverse=True) if each.workers != 0 or each.weights]
    if not lines:
        return short
    go = f"{size(short.missing)} would have to go: {', '.join(lines)}"
    return MemoryShortError(
        short.cause, f"{go}; lower the workers of one, delete it, or end other programs", short.missing
    )


def _size(holding: Holding) -> int:
    return (holding.workers or 0) + holding.weights


def _line(holding: Holding) -> str:
    parts = ["an unknown amount" if holding.workers is None else size(holding.workers)] if holding.workers != 0 else []
    parts += [f"{size(holding.weights)} of weights for its next worker"] if holding.weights else []
    return f"endpoint {holding.endpoint} holds {' and '.join(parts)}"
