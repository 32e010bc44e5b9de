"""The record that a server keeps of its state in its run directory, for `dynamo ls` and for errors."""

from __future__ import annotations

from typing import Literal

import msgspec

from dynamo_local import __version__
from state.files import replace_file
from state.paths import StatePaths

ServerPhase = Literal["starting", "running", "stopping"]


class ServerRecord(msgspec.Struct, frozen=True):
    """`running`: all services have been ready once. `url` of the API and names of the served `models` are known from
    then on; None and empty before, and for a graph that has none. `release`: of the server's program; empty for
    those that did not note it yet."""

    phase: ServerPhase
    url: str | None = None
    models: tuple[str, ...] = ()
    release: str = ""


def write_record(paths: StatePaths, record: ServerRecord) -> None:
    """Replace the record, with the release of this program. Raises DiskError."""
    dated = msgspec.structs.replace(record, release=__version__)
    replace_file(paths.record_file, msgspec.json.encode(dated), durable=False)


def read_record(paths: StatePaths) -> ServerRecord | None:
    """The record of the namespace's server; None if there is none, or it cannot be read."""
    try:
        return msgspec.json.decode(paths.record_file.read_bytes(), type=ServerRecord)
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
