"""`cpu-tuning: false` leaves engines to the kernel and to vLLM's own ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from components.workers.settings import worker_schema
from dynamo_local.core.errors import EngineError
from dynamo_local.engine.vllm import engine as engine_module
from dynamo_local.engine.vllm.engine import VllmEngine
from state.devices.allocation import CPU_CORES_VARIABLE

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("config", "bound"), [({}, True), ({"cpu-tuning": True}, True), ({"cpu-tuning": False}, False)]
)
async def test_an_engine_is_bound_to_its_cores_unless_that_is_turned_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, Any], bound: bool
) -> None:
    monkeypatch.setenv(CPU_CORES_VARIABLE, "0")
    for name in ("TMPDIR", "VLLM_RPC_BASE_PATH", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.setenv(name, "1")
    bindings: list[Any] = []

    def launch(
        config: object, kv_transfer: bool, threads: object, binding: object, progress: object, *_: object
    ) -> Any:
        bindings.append(binding)
        raise EngineError("it is not started")

    monkeypatch.setattr(engine_module, "launch", launch)
    engine = VllmEngine({"model": "none", **config}, tmp_path)
    with pytest.raises(EngineError, match="not started"):
        await engine.start(lambda _: None)
    await engine.close(0.0)
    assert [binding is not None for binding in bindings] == [bound]


def test_workers_take_the_setting() -> None:
    key = worker_schema().keys()["cpu-tuning"]
    assert (key.kind, key.default) == ("bool", True)


def test_tuning_patches_are_applied_where_the_setting_is_asked_for_alone() -> None:
    """By the engine's start, by the worker's side of the KV connector, and by parking."""
    package = ROOT / "dynamo_local/engine/vllm"
    line = "from dynamo_local.engine.vllm.patches.tuning import"
    users = {str(path.relative_to(package)) for path in package.rglob("*.py") if line in path.read_text()}
    assert users == {"launch.py", "kv/pull/worker.py", "parking.py"}
