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
