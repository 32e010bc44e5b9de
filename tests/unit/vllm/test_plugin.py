from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest

from dynamo_local.engine.vllm.patches.forks import list_plugins_once

_FROZEN = """
import gc
from dynamo_local.engine.vllm.plugin import register
register()
gc.freeze()
gc.unfreeze()
print(gc.get_freeze_count() > 0)
"""


@pytest.mark.parametrize(("environ", "stays"), [({"DYN_WATCHER": "dynamo_VllmWorker"}, "True"), ({}, "False")])
def test_what_an_engine_has_frozen_stays_so_in_processes_of_ours_alone(environ: dict[str, str], stays: str) -> None:
    done = subprocess.run([sys.executable, "-c", _FROZEN], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == stays


_NAMED = """
from multiprocessing import shared_memory
from dynamo_local.engine.vllm.plugin import register
register()
memory = shared_memory.SharedMemory(create=True, size=8)
memory.unlink()
print(memory.name)
"""


@pytest.mark.parametrize(("watcher", "begins"), [({"DYN_WATCHER": "dynamo_VllmWorker"}, "dynamo-x-y-"), ({}, "psm_")])
def test_shared_memory_of_processes_of_ours_alone_is_named_by_whose_it_is(watcher: dict[str, str], begins: str) -> None:
    environ = {**watcher, "DYN_SHM_PREFIX": "dynamo-x-y-"}
    done = subprocess.run([sys.executable, "-c", _NAMED], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(begins)


def test_plugins_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    find, looked = metadata.entry_points, list[str]()

    def entry_points(**params: Any) -> Any:
        looked.append(params["group"])
        return find(**params)

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    list_plugins_once(["vllm.general_plugins"])
    for _ in range(2):
        found = {each.name for each in metadata.entry_points(group="vllm.general_plugins")}
        assert found == {each.name for each in find(group="vllm.general_plugins")}
    metadata.entry_points(group="others")
    assert looked == ["vllm.general_plugins", "others"]
