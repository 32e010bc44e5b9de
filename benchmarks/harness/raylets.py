"""Several raylets on one machine, as lean as Ray can be."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from state.paths import STATE_DIR_VARIABLE

_LEAN: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",
    # A raylet that is killed is found out in a second, and one that is starved for some is not taken for dead.
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
_NOTHING_AHEAD: Mapping[str, str] = {
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
}
"""A raylet starts as many Python processes as it has cores otherwise, which take the tasks and actors that come."""

_HEAD = {"include_dashboard": False, "no_monitor": True, "include_log_monitor": False}
# `ray.init` takes 127.0.0.1 for the machine's other address, on which nothing listens then.
_NODE = {"node_ip_address": "127.0.0.2", "object_store_memory": 80 * 1024 * 1024}


class Raylets:
    """A cluster. `nodes`: handles of Ray's, the head first."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.nodes: list[Any] = []

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def head_pid(self) -> int:
        """The pid of the head's server, the GCS."""
        return int(self.nodes[0].all_processes["gcs_server"][0].process.pid)

    def add(self, cpus: int = 2, gpus: int = 0, *, wait: bool = True) -> Any:
        """Start a raylet, and wait until it is in the table of nodes if told to."""
        head = _HEAD if not self.nodes else {}
        self.nodes.append(self._cluster.add_node(wait=wait, num_cpus=cpus, num_gpus=gpus, **_NODE, **head))
        return self.nodes[-1]

    def alive(self) -> set[str]:
        """Ids of the nodes that the table has as alive."""
        return {row["NodeID"] for row in self._cluster.global_state.node_table() if row["Alive"]}

    def kill_head(self) -> None:
        """SIGKILL the GCS, the head's server, whose tables are on disk."""
        self.nodes[0].kill_gcs_server(check_alive=False)

    def start_head(self) -> None:
        """Start the GCS again, with its tables."""
        self.nodes[0].start_gcs_server()

    def kill(self, node: Any) -> None:
        """SIGKILL a raylet, and reap it: a zombie looks alive to its actors."""
        process = node.all_processes["raylet"][0].process
        process.kill()
        process.wait()
        self.nodes.remove(node)


def raylet_pid(node: Any) -> int:
    """The pid of that raylet."""
    return int(node.all_processes["raylet"][0].process.pid)


@contextmanager
def raylets(
    count: int,
    directory: Path,
    storage: Mapping[str, str] | None = None,
    *,
    prestart: bool = False,
    project: Path | None = None,
) -> Iterator[Raylets]:
    """A cluster of so many raylets, with two cores each. `directory`: of the head's tables, and of what node servers
    keep. `storage`: variables that have the head's tables elsewhere. `prestart`: raylets start processes for what is to
    come, as they do by default. `project`: the checkout whose code node servers run; None: what is installed."""
    on_disk = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(directory / "gcs")}
    kept = {**(on_disk if storage is None else storage), **({} if prestart else _NOTHING_AHEAD)}
    code = {} if project is None else {"PYTHONPATH": str(project)}
    # A node server imports from the folder that its raylet was started in before it looks elsewhere.
    folder = project or Path.cwd()
    # Not below the temporary folder of this process: its path may be too long for the sockets of Ray and of nodes.
    with (
        TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as temporary,
        patch.dict(
            os.environ, {**_LEAN, **kept, **code, "TMPDIR": temporary, STATE_DIR_VARIABLE: str(directory / "state")}
        ),
        chdir(folder),
    ):
        from ray.cluster_utils import Cluster

        cluster = Cluster()
        made = Raylets(cluster)
        try:
            for _ in range(count):
                made.add()
            yield made
        finally:
            cluster.shutdown()
