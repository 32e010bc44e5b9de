"""Time, and engines in it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .two_engines import SETTINGS, Party, parties
from .virtual_time import SharedTime


@pytest.fixture
def time() -> SharedTime:
    return SharedTime()


@pytest.fixture
async def pair(time: SharedTime, tmp_path: Path) -> AsyncIterator[list[Party]]:
    """A source and a reader."""
    async with parties(time, tmp_path, SETTINGS, SETTINGS) as found:
        yield found
