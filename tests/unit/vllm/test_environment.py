"""What a process settles before it imports vLLM: the cores of its threads, its plugins, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.core.errors import ConfigError
from dynamo_local.engine.vllm.environment import prepare_environment


@pytest.mark.parametrize(
    ("given", "bound", "threads"),
    [
        ({"DYN_CPU_CORES": "0,1|2,3", "DYN_DEVICE_SHARE": ""}, "0,1|2,3", "2"),
        # Bound core by core, the threads of two workers would meet on the first.
        ({"DYN_CPU_CORES": "0,1,2,3", "DYN_DEVICE_SHARE": "0.5", "OMP_NUM_THREADS": "2"}, "nobind", "2"),
        ({"DYN_CPU_CORES": "0,1", "VLLM_CPU_OMP_THREADS_BIND": "0", "DYN_DEVICE_SHARE": "0.5"}, "0", "2"),
        ({}, None, None),
    ],
)
def test_threads_keep_to_the_slots_and_share_them(
    tmp_path: Path, given: dict[str, str], bound: str | None, threads: str | None
) -> None:
    environ = dict(given)
    prepare_environment(tmp_path, environ)
    assert environ.get("VLLM_CPU_OMP_THREADS_BIND") == bound
    assert environ.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(
    ("given", "loaded"),
    [(None, None), ("", ",dynamo_local"), ("mine", "mine,dynamo_local"), ("dynamo_local,mine", "dynamo_local,mine")],
)
def test_a_list_of_plugins_leaves_ours_in_place(tmp_path: Path, given: str | None, loaded: str | None) -> None:
    environ = {} if given is None else {"VLLM_PLUGINS": given}
    prepare_environment(tmp_path, environ)
    assert environ.get("VLLM_PLUGINS") == loaded


def test_a_process_refuses_what_its_machine_has_set(tmp_path: Path) -> None:
    """A node's environment is not that of `dynamo serve`."""
    with pytest.raises(ConfigError, match="VLLM_ALLOW_INSECURE_SERIALIZATION is not for"):
        prepare_environment(tmp_path, {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"})
