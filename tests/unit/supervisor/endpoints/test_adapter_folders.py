"""What is wrong with an adapter is told in one line, once, and concerns nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from dynamo_local.core.endpoints.checks import read_spec
from dynamo_local.core.endpoints.registry import Registry, create, delete
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import UsageError
from dynamo_local.core.messages.endpoints import EndpointStatus
from dynamo_local.supervisor.endpoints.adapters import AdapterFolders
from dynamo_local.supervisor.endpoints.kept_registry import KeptRegistry
from state.endpoints.registry import RegistryStore
from state.locks import ServerLock
from state.paths import StatePaths
from tests.unit.adapter_files import Q_PROJ, adapter, tensors
from tests.unit.supervisor.endpoints.made_parts import Record

READY = EndpointStatus("ready", ready=1)


@dataclass
class Run:
    """What runs for the base."""

    model_folder: str = ""
    failed_adapters: dict[str, str] = field(default_factory=dict)


@dataclass
class Scene:
    """Adapters `pirate` (rank 8) and `robot` (rank 40) of an endpoint. `told`: what has happened to them."""

    kept: KeptRegistry
    run: Run
    root: Path
    told: list[tuple[str, str, str]]
    folders: AdapterFolders

    def status(self, name: str) -> EndpointStatus:
        return self.folders.status(spec_of(self.root, name), None, READY)


def spec_of(root: Path, name: str) -> EndpointSpec:
    return read_spec({"name": name, "model": str(root / name), "adapter_of": "chat"})


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    registry = create(Registry(), read_spec({"name": "chat", "model": "m"}), 1.0)
    for name, rank in (("pirate", 8), ("robot", 40)):
        adapter(tmp_path / name, rank=rank)
        registry = create(registry, spec_of(tmp_path, name), 1.0)
    record = Record()
    with ServerLock(StatePaths(tmp_path / "state", "here")) as lock:
        kept, run = KeptRegistry(RegistryStore(lock), registry), Run()
        runs: dict[str, Any] = {"chat": run}
        folders = AdapterFolders(kept, runs, cast("Any", record), on_cpu=True)
        yield Scene(kept, run, tmp_path, record.told, folders)


async def test_a_folder_that_has_gone(scene: Scene) -> None:
    folders, registry, pirate = scene.folders, scene.kept.current, scene.root / "pirate"
    await folders.look()
    assert folders.ranks(registry, "chat") == {"pirate": 8, "robot": 40}
    assert scene.told == []
    shutil.rmtree(pirate)
    for _ in range(2):
        await folders.look()
    line = f"adapter pirate: {pirate} does not exist"
    assert scene.told == [("pirate", "failed", line)]
    assert (scene.status("pirate").state, scene.status("pirate").reason) == ("failed", line)
    assert scene.status("robot").state == "ready"
    assert folders.ranks(registry, "chat")["pirate"] == 8
    adapter(pirate, rank=16)
    await folders.look()
    assert scene.status("pirate").state == "ready"
    assert scene.told[1:] == [("pirate", "may be loaded again", "")]
    shutil.rmtree(pirate)
    await folders.look()
    await scene.kept.change(lambda before: delete(before, "pirate"))
    await folders.look()
    assert scene.status("pirate").state == "ready", "another one of that name is not judged by it"


async def test_an_adapter_of_another_model_than_its_base(scene: Scene) -> None:
    """The base may not be here when the adapter is ordered, and may be changed later."""
    folders, chat, pirate = scene.folders, scene.kept.current.entry("chat").spec, spec_of(scene.root, "pirate")
    await folders.read(pirate, chat)
    base = scene.root / "base"
    base.mkdir()
    tensors(base / "model.safetensors", {f"model.{Q_PROJ}.weight": (64, 48)})
    scene.run.model_folder = str(base)
    with pytest.raises(UsageError, match="64 x 32, which in the base is one of 64 x 48"):
        await folders.read(pirate, chat)
    await folders.look()
    assert [(name, what) for name, what, _ in scene.told] == [("pirate", "failed"), ("robot", "failed")]
    assert "which in the base is one of 64 x 48" in scene.status("pirate").reason
    tensors(base / "model.safetensors", {f"model.{Q_PROJ}.weight": (64, 32)})
    await folders.look()
    assert scene.status("pirate").state == "ready"


async def test_what_a_worker_cannot_load_has_failed(scene: Scene) -> None:
    order = scene.kept.current.entry("pirate").order
    scene.run.failed_adapters = {f"pirate@{order}.1": "vLLM does not yet support DoRA.", "robot@1.1": "a former one"}
    for _ in range(2):
        await scene.folders.look()
    line = "a worker cannot load it: vLLM does not yet support DoRA."
    assert scene.told == [("pirate", "failed", line)]
    assert (scene.status("pirate").state, scene.status("pirate").reason) == ("failed", line)
    assert scene.status("robot").state == "ready"
    scene.run.failed_adapters = {}
    await scene.folders.look()
    assert scene.status("pirate").state == "ready"
