"""Stored files: what is known of each, and the bounds on them. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from dynamo_local.core.errors import ConfigError, StorageFullError

FILE_ID = re.compile(r"file-[0-9a-f]{24}")
"""What the id of a file looks like, whole. It is the name of a folder as well."""

PURPOSES = ("batch", "user_data")
"""Purposes for which clients may upload files."""

BATCH, BATCH_OUTPUT = "batch", "batch_output"

LEAST_EXPIRY_S, MOST_EXPIRY_S = 3600, 30 * 24 * 3600
"""Bounds on the time after which a file expires, as OpenAI has them."""

NAME_CHARACTERS = 255

_DIGITS = 18
_MIB = 1024 * 1024


class StoredFile(msgspec.Struct, frozen=True):
    """A file. `owner`: as `Caller.owner` has it. Times in whole seconds since 1970."""

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int

    def has_expired(self, now: float) -> bool:
        """Whether the file's time is over."""
        return now >= self.expires_at

    def shown(self) -> dict[str, object]:
        """Return the file as OpenAI's clients know one."""
        shown = {name: value for name, value in msgspec.structs.asdict(self).items() if name != "owner"}
        return {"object": "file", **shown, "status": "processed", "status_details": None}


@dataclass(frozen=True)
class FileLimits:
    """Bounds on stored files."""

    max_file_bytes: int = field(default=200 * _MIB, metadata={"help": "Maximum size of an uploaded file, in bytes."})
    max_files: int = field(default=1000, metadata={"help": "Maximum number of stored files of each key."})
    max_stored_bytes: int = field(
        default=2048 * _MIB, metadata={"help": "Maximum size of all stored files of each key, in bytes."}
    )
    max_stored_bytes_in_all: int = field(
        default=20 * 1024 * _MIB, metadata={"help": "Maximum size of all stored files of all keys, in bytes."}
    )


def check_room(files: Sequence[StoredFile], owner: str, more: int, limits: FileLimits) -> None:
    """Check that an owner may store a file of so many more bytes. Raises StorageFullError."""
    of_owner = [file for file in files if file.owner == owner]
    bounds = (
        ("number of stored files", len(of_owner) + 1, limits.max_files, "max-files"),
        (
            "size of stored files in bytes",
            sum(file.bytes for file in of_owner) + more,
            limits.max_stored_bytes,
            "max-stored-bytes",
        ),
        (
            "size of stored files of all keys in bytes",
            sum(file.bytes for file in files) + more,
            limits.max_stored_bytes_in_all,
            "max-stored-bytes-in-all",
        ),
    )
    for what, wanted, most, setting in bounds:
        if wanted > most:
            raise StorageFullError(f"the {what} would be {wanted}, at most {most} (setting {setting})", "delete files")


def check_purpose(purpose: str | None) -> str:
    """Check the purpose of an upload. Raises ConfigError."""
    if purpose in PURPOSES:
        return purpose
    raise ConfigError(f"purpose must be one of {', '.join(PURPOSES)}, got {(purpose or 'none')[:60]!r}")


def expiry_of(anchor: str | None, seconds: str | int | None) -> int:
    """Return after how many seconds a file expires that says so; the most if it says nothing. Raises ConfigError."""
    if anchor is None and seconds is None:
        return MOST_EXPIRY_S
    if anchor != "created_at":
        raise ConfigError(f"the anchor of expires_after must be created_at, got {(anchor or 'none')[:60]!r}")
    text = str(seconds)
    number = int(text) if text.isascii() and text.isdigit() and len(text) < _DIGITS else -1
    if not LEAST_EXPIRY_S <= number <= MOST_EXPIRY_S:
        raise ConfigError(f"the seconds of expires_after must be {LEAST_EXPIRY_S} to {MOST_EXPIRY_S}, got {text[:20]}")
    return number
