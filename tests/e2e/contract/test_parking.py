"""What parking calls in vLLM, and its part that needs a GPU: here, only that it is there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms.interface import Platform, PlatformEnum
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.worker.gpu_worker import Worker

from dynamo_local.engine.vllm import parking
from dynamo_local.engine.vllm.parking import let_engines_park
from dynamo_local.engine.vllm.patches.table import why_not


def test_what_parking_calls_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for order in ("park", "wake"):
        monkeypatch.setattr(EngineCore, f"dynamo_local_{order}", None, raising=False)
    assert why_not(parking.PATCH) is None
    let_engines_park()
    found: Any = EngineCore
    assert (found.dynamo_local_park, found.dynamo_local_wake) == (parking.park_core, parking.wake_core)


def test_a_gpu_sleeps_at_level_1_and_is_started_so_that_it_can() -> None:
    assert list(inspect.signature(Worker.sleep).parameters) == ["self", "level"]
    assert list(inspect.signature(Worker.wake_up).parameters) == ["self", "tags"]
    assert inspect.signature(EngineCore.sleep).parameters["level"].default == 1
    assert isinstance(inspect.getattr_static(Executor, "is_sleeping"), property)
    assert AsyncEngineArgs.enable_sleep_mode is False

    class Gpu(Platform):
        _enum = PlatformEnum.CUDA

    assert Gpu().is_sleep_mode_available()


class Core:
    """An engine core on a GPU, as far as parking looks at it."""

    def __init__(self, slept: Future[None] | None = None, *, wakes: bool = True) -> None:
        self.scheduler = SimpleNamespace(requests={}, get_kv_connector=lambda: None)
        self.model_executor = SimpleNamespace(is_sleeping=False)
        self.batch_queue: list[object] = []
        self.paused = False
        self._slept = slept
        self._wakes = wakes

    def sleep(self, level: int) -> Future[None] | None:
        assert level == 1
        self.model_executor.is_sleeping = self.paused = True
        return self._slept

    def wake_up(self) -> bool:
        self.model_executor.is_sleeping = self.paused = not self._wakes
        return self._wakes

    def is_scheduler_paused(self) -> bool:
        return self.paused

    def resume_scheduler(self) -> None:
        self.paused = False


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "_on_cpu", lambda: False)


def order(function: Callable[..., Any], core: Core) -> Any:
    return function(core)


@pytest.mark.usefixtures("on_gpu")
def test_an_engine_on_a_gpu_sleeps_and_wakes() -> None:
    core = Core()
    assert order(parking.park_core, core) is None
    assert (core.paused, core.model_executor.is_sleeping) == (True, True)
    assert order(parking.wake_core, core) is None
    assert (core.paused, core.model_executor.is_sleeping) == (False, False)
    assert order(parking.wake_core, core) is None
    later: Future[None] = Future()
    assert order(parking.park_core, Core(later)) is later
    broken = Core(wakes=False)
    order(parking.park_core, broken)
    assert order(parking.wake_core, broken) is not None


@pytest.mark.usefixtures("on_gpu")
def test_an_engine_that_is_needed_or_read_by_others_does_not_sleep() -> None:
    core = Core()
    core.scheduler.requests = {"r": object()}
    assert order(parking.park_core, core) == "the engine has requests"
    core.scheduler.requests = {}
    core.batch_queue = [object()]
    assert order(parking.park_core, core) == "the engine has requests"
    core.batch_queue = []
    core.scheduler.get_kv_connector = lambda: object()
    assert "kv-transfer-config" in order(parking.park_core, core)
    assert not core.paused
