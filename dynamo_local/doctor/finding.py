"""What a check has found."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Level = Literal["ok", "warn", "fail"]
"""`warn`: works, with less speed, safety or room. `fail`: a server cannot start or cannot work."""

GIB = 2**30
MIB = 2**20


class Finding(msgspec.Struct, frozen=True):
    """The result of one check. `remedy` is empty if there is nothing to do."""

    check: str
    level: Level
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, "ok", found)


def warn(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, "warn", found, remedy)


def fail(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, "fail", found, remedy)


def any_failed(findings: Iterable[Finding]) -> bool:
    return any(finding.level == "fail" for finding in findings)


def shown_bytes(size: int) -> str:
    """A size for people: "512 MiB", "3.2 GiB"."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
