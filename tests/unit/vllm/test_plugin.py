from __future__ import annotations

import subprocess
import sys

import pytest

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
