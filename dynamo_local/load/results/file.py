"""The file of a run: settings, figures, and the record of every request, to recompute figures from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from dynamo_local.core.errors import UsageError
from dynamo_local.load.results.figures import Figures
from dynamo_local.load.results.records import Record

FORMAT = 1


class Run(msgspec.Struct):
    """A run, as it is saved."""

    settings: dict[str, Any]
    """The given options and the seed: with them the same load can be sent again."""
    figures: Figures
    notes: list[str]
    """Sentences that qualify the figures."""
    warmup_s: float
    interrupted: bool
    client_cpu_share: float
    """Share of one core that the generator used, 0 to 1."""
    requests: list[Record]
    format: int = FORMAT


def encode(run: Run) -> bytes:
    """Encode a run as JSON. Times are rounded to microseconds."""
    return msgspec.json.encode(_rounded(msgspec.to_builtins(run))) + b"\n"


def read(path: Path) -> Run:
    """Read the file of a run. Raises UsageError."""
    try:
        run = msgspec.json.decode(path.read_bytes(), type=Run)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is not a file of `dynamo load --json`: {error}") from error
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
