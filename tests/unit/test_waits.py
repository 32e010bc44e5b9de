"""Waits that can be cancelled at any moment."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_nobody_waits_by_wait_for() -> None:
    """In Python 3.11 asyncio.wait_for forgets a cancellation that comes together with what it waits for: a loop around
    it goes on for ever. asyncio.timeout does not."""
    found = [
        str(file.relative_to(ROOT))
        for folder in ("dynamo_local", "components", "state")
        for file in (ROOT / folder).rglob("*.py")
        if "asyncio.wait_for(" in file.read_text()
    ]
    assert not found
