"""An adapter whose folder has gone is told in one line, once, and concerns nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from dynamo_local.core.endpoints.checks import read_spec
from dynamo_local.core.endpoints.registry import Registry, create, delete
from dynamo_local.core.messages.endpoints import EndpointStatus
from dynamo_local.supervisor.endpoints.adapters import AdapterFolders
from dynamo_local.supervisor.endpoints.kept_registry import KeptRegistry
from state.endpoints.registry import RegistryStore
from state.locks import ServerLock
from state.paths import StatePaths

READY = EndpointStatus("ready", ready=1)


def fill(folder: Path, rank: int) -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (folder / "adapter_model.safetensors").touch()


async def test_a_folder_that_has_gone(tmp_path: Path) -> None:
    for name, rank in (("pirate", 8), ("robot", 40)):
        fill(tmp_path / name, rank)
    registry = create(Registry(), read_spec({"name": "chat", "model": "m"}), 1.0)
    specs = [
        read_spec({"name": name, "model": str(tmp_path / name), "adapter_of": "chat"}) for name in ("pirate", "robot")
    ]
    for spec in specs:
        registry = create(registry, spec, 1.0)
    told: list[tuple[str, str, str]] = []
    with ServerLock(StatePaths(tmp_path / "state", "here")) as lock:
        kept = KeptRegistry(RegistryStore(lock), registry)
        folders = AdapterFolders(kept, lambda *event: told.append(event), on_cpu=True)
        await folders.look()
        assert folders.ranks(registry, "chat") == {"pirate": 8, "robot": 40}
        assert told == []
        shutil.rmtree(tmp_path / "pirate")
        for _ in range(2):
            await folders.look()
        line = f"adapter pirate: {tmp_path}/pirate does not exist"
        assert told == [("pirate", "failed", line)]
        pirate, robot = (folders.status(spec, None, READY) for spec in specs)
        assert (pirate.state, pirate.reason, robot.state) == ("failed", line, "ready")
        assert folders.ranks(registry, "chat")["pirate"] == 8
        fill(tmp_path / "pirate", 16)
        await folders.look()
        assert folders.status(specs[0], None, READY).state == "ready"
        assert told[1:] == [("pirate", "its folder is there again", "")]
        shutil.rmtree(tmp_path / "pirate")
        await folders.look()
        await kept.change(lambda before: delete(before, "pirate"))
        await folders.look()
        assert folders.status(specs[0], None, READY).state == "ready", "another one of that name is not judged by it"
