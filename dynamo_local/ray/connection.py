"""Joins a Ray cluster that is there, and turns Ray's errors into those of the tree."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray._private import worker as ray_worker
from ray.exceptions import RayError

from dynamo_local.core.errors import SupervisorError, UsageError, one_line

_ERRORS = (RayError, RuntimeError, ValueError, OSError)
"""What Ray raises, and what the way to it does."""


def join(namespace: str, address: str | None) -> None:
    """Make this process a driver of the cluster. Raises UsageError if there is none, or one of other versions."""
    if address is not None and address.startswith("ray://"):
        raise UsageError(f"{address} is for Ray's client", "run this on a node of the cluster, with address auto")
    # `ray job submit` sets it in its entrypoint.
    named = address or os.environ.get("RAY_ADDRESS")
    _check_listens(named)
    # How long the head of the cluster may be away before Ray aborts this process: a day.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "86400")
    # Ray would print each death of an actor on standard output; a server reports those of its nodes.
    ray_worker.print_to_stdstream = lambda *_, **__: None
    try:
        ray.init(
            address=address or "auto", namespace=f"dynamo/{namespace}", log_to_driver=False, logging_level=logging.ERROR
        )
    except _ERRORS as error:
        if "version mismatch" in str(error).lower():
            remedy = "install the same Ray and Python on all nodes"
            raise UsageError(one_line(error).rstrip("."), remedy) from error
        raise _no_cluster(named, one_line(error)) from error


def _check_listens(address: str | None) -> None:
    """Raise UsageError if nothing listens there: Ray itself would wait for a minute."""
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, one_line(error)) from error


def _no_cluster(address: str | None, why: str) -> UsageError:
    where = f"at {address}" if address else "on this machine"
    return UsageError(
        f"no Ray cluster {where} can be joined: {why}",
        "start one (`ray start --head`), or join one (`ray start --address HEAD:6379`)",
    )


@contextmanager
def ray_errors(what: str) -> Iterator[None]:
    """Turn Ray's errors into SupervisorError. `what`: is attempted, in words."""
    try:
        yield
    except _ERRORS as error:
        raise SupervisorError(f"Ray cannot {what}: {one_line(error)}", "see `ray status`") from error
