"""An engine that fails because a test has ordered it."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.mocker.engine import Order, order_file

from .driving import SETTINGS, engine_in, work
from .virtual_time import VirtualTime


def order(folder: Path, what: Order | str) -> None:
    order_file(folder, os.getpid()).write_text(what)


async def test_a_step_raises_and_nothing_works_afterwards(tmp_path: Path) -> None:
    engine = engine_in(VirtualTime(), replace(SETTINGS, mocker_orders=str(tmp_path)))
    await engine.submit(work())
    assert (await engine.step()).deltas
    order(tmp_path, "raise")
    with pytest.raises(EngineError, match="ordered to fail"):
        await engine.step()
    with pytest.raises(EngineError, match="ordered to fail"):
        await engine.submit(work("another"))


async def test_a_step_does_not_end(tmp_path: Path) -> None:
    engine = engine_in(VirtualTime(), replace(SETTINGS, mocker_orders=str(tmp_path)))
    await engine.submit(work())
    order(tmp_path, "hang")
    step = asyncio.create_task(engine.step())
    done, _ = await asyncio.wait({step}, timeout=0.05)
    assert not done
    step.cancel()


async def test_what_is_no_order_is_passed_over(tmp_path: Path) -> None:
    engine = engine_in(VirtualTime(), replace(SETTINGS, mocker_orders=str(tmp_path)))
    await engine.submit(work())
    order(tmp_path, "explode")
    assert (await engine.step()).deltas
