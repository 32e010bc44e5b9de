"""The file of a run: what was asked, what came of it, and every request, so that figures can be computed anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from dynamo_local.core.errors import UsageError
from dynamo_local.load.results.figures import Figures
from dynamo_local.load.results.records import Record

FORMAT = 1


class Run(msgspec.Struct):
    """One load, as it is saved."""

    settings: dict[str, Any]
    """What was asked, the seed included: with it the same load can be sent again."""
    figures: Figures
    notes: list[str]
    """What to bear in mind when reading the figures."""
    warmup_s: float
    interrupted: bool
    client_cpu_share: float
    """Of one core, used by the generator."""
    requests: list[Record]
    format: int = FORMAT


def encode(run: Run) -> bytes:
    """Times to the microsecond: there is no more to them."""
    return msgspec.json.encode(_rounded(msgspec.to_builtins(run))) + b"\n"


def read(path: Path) -> Run:
    """Raises UsageError."""
    try:
        run = msgspec.json.decode(path.read_bytes(), type=Run)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is no result of `dynamo load --json`: {error}") from error
    if run.format != FORMAT:
        raise UsageError(f"{path} has format {run.format}, this version reads {FORMAT}")
    return run


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return round(value, 6)
        case list():
            return [_rounded(each) for each in value]
        case dict():
            return {key: _rounded(each) for key, each in value.items()}
    return value
