"""Frontends that keep answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.frontend.kept_scene import Application, Frontend, Start


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    frontends: list[Frontend] = []

    async def begin(application: Application, root: Path = tmp_path, **more: Any) -> Frontend:
        frontends.append(Frontend(root, application, **more))
        return await frontends[-1].start()

    yield begin
    for frontend in frontends:
        await frontend.close()
