"""Running servers, and what crashed ones have left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dynamo_local.core.doctor.finding import Finding, fail, ok, warn


@dataclass(frozen=True)
class ServerFacts:
    """What is known of the server of a namespace.

    `pid`: of the server; None if none runs. `trouble`: why its files cannot be read. `phase`: "starting", "running" or
    "stopping". `url`: of its API; None without one. `healthy`: whether the API says so; None if it does not answer.
    `dead`: watchers whose processes are gone. `left`: what a dead server has left, in words. `survivors`: pids of
    processes that it has left.
    """

    namespace: str
    pid: int | None = None
    trouble: str | None = None
    phase: str = "running"
    url: str | None = None
    healthy: bool | None = None
    dead: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    survivors: tuple[int, ...] = ()


@dataclass(frozen=True)
class Servers:
    """`foreign_segments`: shared memory of this user under our names that no process uses and no namespace here has.
    `foreign_sockets`: such folders of sockets in $TMPDIR."""

    servers: tuple[ServerFacts, ...]
    foreign_segments: tuple[str, ...] = ()
    foreign_sockets: tuple[str, ...] = ()


def check_servers(facts: Servers) -> Iterator[Finding]:
    for server in facts.servers:
        yield _trouble(server) or (_running(server) if server.pid is not None else _ended(server))
    if not facts.servers:
        yield ok("servers", "none runs, and none has left anything")
    if facts.foreign_segments:
        paths = " ".join(f"/dev/shm/{name}" for name in facts.foreign_segments)
        yield warn(
            "leftovers",
            f"{len(facts.foreign_segments)} files of shared memory of servers that are not in this state folder",
            f"if no container uses them: rm {paths}",
        )
    if facts.foreign_sockets:
        yield warn(
            "leftovers",
            f"{len(facts.foreign_sockets)} folders of sockets on which no process listens",
            f"if no server is starting: rm -r {' '.join(facts.foreign_sockets)}",
        )


def is_clearable(server: ServerFacts) -> bool:
    """Whether what is left can be removed without ending a process."""
    return server.pid is None and bool(server.left) and not server.survivors


def _trouble(server: ServerFacts) -> Finding | None:
    if server.trouble is None:
        return None
    if server.pid is None:
        return fail(f"server {server.namespace}", server.trouble, "look at the permissions of the state folder")
    runs = f"runs (pid {server.pid}), but {server.trouble}"
    return fail(f"server {server.namespace}", runs, f"restart it: {_stop(server)}")


def _running(server: ServerFacts) -> Finding:
    check = f"server {server.namespace}"
    if server.phase != "running":
        return ok(check, f"{server.phase} (pid {server.pid})")
    if server.dead:
        return warn(check, f"no process at the moment: {', '.join(server.dead)}", _ps(server))
    if server.url is None:
        return ok(check, f"running (pid {server.pid})")
    if server.healthy:
        return ok(check, f"ready at {server.url}")
    what = "does not answer" if server.healthy is None else "is not ready"
    return warn(check, f"{server.url} {what}", _ps(server))


def _ended(server: ServerFacts) -> Finding:
    check = f"server {server.namespace}"
    if server.survivors:
        pids = ", ".join(map(str, server.survivors))
        return warn(check, f"crashed, and left processes: {pids}", f"{_stop(server)} ends them")
    return warn(check, f"crashed, and left {', '.join(server.left)}", "`dynamo doctor --fix` removes it")


def _ps(server: ServerFacts) -> str:
    return f"`dynamo ps --namespace {server.namespace}` shows why"


def _stop(server: ServerFacts) -> str:
    return f"`dynamo stop --namespace {server.namespace}`"
