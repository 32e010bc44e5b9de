"""The two sides of every comparison: vLLM's own server, and this project's, as processes seen from outside."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.accounting import Process, descendants, is_alive
from dynamo_local.core.errors import DynamoError
from dynamo_local.load.errors import ExchangeError
from dynamo_local.load.http.endpoint import Endpoint, ask, find_model
from dynamo_local.supervisor.upkeep.cpu_affinity import bind
from state.devices.inventory import CPU_SLOTS_VARIABLE, driver_present, usable_cores

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
NAMESPACE = "bench"
READY_WITHIN_S = 300.0
END_WITHIN_S = 60.0
_POLL_S = 0.05

ENGINE: Mapping[str, Any] = {
    "block-size": 32,
    "max-num-seqs": 64,
    "max-model-len": 4096,
    "enforce-eager": True,
}
"""Engine settings of both sides, beside the data type."""

SMALL_ENGINE: Mapping[str, Any] = {
    "dtype": "float32",
    "enforce-eager": True,
    "max-num-seqs": 16,
    "kv-cache-memory-bytes": 128 * 2**20,
}
"""Engine settings of servers that are killed: a small engine starts soon."""

ENGINE_ENVIRONMENT: Mapping[str, str] = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


class ServerError(DynamoError):
    """A server did not do what it was started for."""


@dataclass
class Server:
    """A server that is starting, or ready."""

    name: str
    popen: subprocess.Popen[bytes]
    port: int
    log: Path
    started_at: float
    """time.monotonic at its start."""
    state_root: Path | None = None
    """Where ours keeps its files."""
    host: str = HOST
    model: str = ""
    processes: tuple[Process, ...] = field(default=())

    async def ready(self) -> float:
        """Wait until /health answers 200. Returns the seconds since the start."""
        deadline = time.monotonic() + READY_WITHIN_S
        while not await self._is_healthy():
            if self.popen.poll() is not None:
                raise ServerError(f"{self.name} ended while it was starting:\n{self.last_lines()}")
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name} is not ready after {READY_WITHIN_S:g} s:\n{self.last_lines()}")
            await asyncio.sleep(_POLL_S)
        took_s = time.monotonic() - self.started_at
        with contextlib.closing(self.endpoint.connections()) as connections:
            self.model, _ = await find_model(connections, self.endpoint, None)
        self.refresh()
        return took_s

    def refresh(self) -> None:
        """Look again which processes there are."""
        self.processes = descendants(self.popen.pid)

    def of_role(self, role: str) -> tuple[Process, ...]:
        return tuple(process for process in self.processes if process.role == role)

    def last_lines(self, count: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    async def stop(self) -> None:
        """End it the way its users do; what then is left of it is killed."""
        self.refresh()
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGINT)
        deadline = time.monotonic() + END_WITHIN_S
        while self.popen.poll() is None and time.monotonic() < deadline:  # noqa: ASYNC110  # a foreign process
            await asyncio.sleep(_POLL_S)  # nothing tells the event loop of a process that ended
        self.kill()

    def kill(self) -> None:
        """Leave no process behind."""
        for process in {*self.processes, *descendants(self.popen.pid)}:
            if is_alive(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        self.popen.wait()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.host, self.port, is_tls=False, path="")

    async def dynamo(self, *arguments: str, project: Path = ROOT, within_s: float = END_WITHIN_S) -> bytes | None:
        """Standard output of a `dynamo` command about this server, one of ours; None if the command fails.

        `project`: the checkout whose `dynamo` it is.
        """
        environ = {**os.environ, "PYTHONPATH": str(project), "DYN_LOCAL_STATE_DIR": str(self.state_root)}
        asked = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dynamo_local.cli.main", *arguments, f"--namespace={NAMESPACE}"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            cwd=project,
            env=environ,
        )
        try:
            async with asyncio.timeout(within_s):
                output, _ = await asked.communicate()
        except TimeoutError:
            asked.kill()
            await asked.wait()
            return None
        return output if asked.returncode == 0 else None

    def replace_by(self, successor: Server) -> None:
        """Stand for another process from now on, which serves in the place of this one."""
        self.popen, self.started_at, self.processes = successor.popen, successor.started_at, ()

    async def get(self, path: str) -> bytes:
        """The body of the answer, on a connection of its own. Raises ExchangeError if its status is not 200."""
        with contextlib.closing(self.endpoint.connections()) as connections:
            return await ask(connections, self.endpoint.request("GET", path))

    async def _is_healthy(self) -> bool:
        try:
            await self.get("/health")
        except ExchangeError:
            return False
        return True


def engine_settings(model: str) -> Mapping[str, Any]:
    """Return `ENGINE` with the data type that the model's weights are stored in."""
    config = json.loads((Path(model) / "config.json").read_text())
    return {**ENGINE, "dtype": config.get("dtype") or config.get("torch_dtype") or "float32"}


def start_vllm(folder: Path, model: str, engine_core: int | None = None) -> Server:
    """vLLM's own server (the module behind `vllm serve`), its engine's threads bound to the core, if one is named."""
    port = _free_port()
    argv = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
    settings = {
        "model": model,
        "host": HOST,
        "port": port,
        **engine_settings(model),
        # What ours sets too: they cost, and nobody reads them here.
        "disable-uvicorn-access-log": True,
        "uvicorn-log-level": "warning",
    }
    for key, value in settings.items():
        argv += [f"--{key}"] if value is True else [f"--{key}", str(value)]
    environ = {**ENGINE_ENVIRONMENT, "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if engine_core is not None:
        environ["VLLM_CPU_OMP_THREADS_BIND"] = str(engine_core)
    return _start("vLLM", argv, environ, folder / "vllm.log", port)


def start_ours(
    folder: Path,
    model: str,
    graph: str,
    overrides: Mapping[str, Any],
    options: Sequence[str] = (),
    project: Path = ROOT,
) -> Server:
    """`dynamo serve` of one of the example graphs ("agg", "agg_router"). `options`: further ones of its own. `project`:
    the checkout whose code serves."""
    port = _free_port()
    argv = [sys.executable, "-m", "dynamo_local.cli.main", "serve", f"examples.llm.graphs.{graph}:Frontend"]
    argv += ["-f", f"examples/llm/configs/{graph}.yaml", "--model", model]
    argv += [f"--port={port}", f"--namespace={NAMESPACE}", *options]
    settings = {f"VllmWorker.{key}": value for key, value in engine_settings(model).items()} | dict(overrides)
    argv += [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()]
    return _start_ours(argv, folder, port, project)


def start_endpoints(
    folder: Path, specs: Sequence[Mapping[str, Any]] | None, options: Sequence[str] = (), *, port: int | None = None
) -> Server:
    """`dynamo serve` of these endpoints; of those that are registered already if `specs` is None."""
    port = _free_port() if port is None else port
    argv = [sys.executable, "-m", "dynamo_local.cli.main", "serve", f"--port={port}", f"--namespace={NAMESPACE}"]
    if specs is not None:
        file = folder / "endpoints.yaml"
        # JSON is YAML.
        file.write_text(json.dumps({"endpoints": list(specs)}, indent=2))
        argv += ["-f", str(file)]
    return _start_ours([*argv, *options], folder, port)


def _start_ours(argv: list[str], folder: Path, port: int, project: Path = ROOT) -> Server:
    state_root = folder / "state"
    environ = {**ENGINE_ENVIRONMENT, "DYN_LOCAL_STATE_DIR": str(state_root)}
    if not driver_present():
        # Two sides of a comparison may be there at the same time, on the same cores.
        environ[CPU_SLOTS_VARIABLE] = str(len(usable_cores()))
    server = _start("ours", argv, environ, folder / "ours.log", port, project)
    server.state_root = state_root
    return server


def add_project(parser: argparse.ArgumentParser) -> None:
    """An option to measure another state of the code."""
    parser.add_argument("--project", type=Path, default=ROOT, metavar="CHECKOUT", help="whose code serves (this one)")


def add_override(parser: argparse.ArgumentParser) -> None:
    """An option to try settings out on our side."""
    parser.add_argument(
        "--override", action="append", default=[], metavar="SERVICE.KEY=VALUE", help="a setting of `dynamo serve`"
    )


def parse_overrides(options: list[str]) -> dict[str, str]:
    """The settings named by those options."""
    return {key: value for key, _, value in (option.partition("=") for option in options)}


@contextlib.asynccontextmanager
async def running(*servers: Server) -> AsyncIterator[None]:
    """However the block is left: afterwards none of the servers is there."""
    try:
        yield
        await asyncio.gather(*(server.stop() for server in servers))
    finally:
        for server in servers:
            server.kill()


def spread_over_cores(servers: list[Server], engine_core: int) -> None:
    """The same place for both sides: their engines on one core, all else (and this client) on the others.

    vLLM's EngineCore waits for its Worker by polling. On the Worker's core it yields to it; on another core it would
    use that up, at the cost of everything else there.
    """
    rest = os.sched_getaffinity(0) - {engine_core} or {engine_core}
    for server in servers:
        engine = {*server.of_role("EngineCore"), *server.of_role("Worker")}
        bind((process.pid for process in engine), {engine_core})
        bind((process.pid for process in server.processes if process not in engine), rest)
    os.sched_setaffinity(0, rest)


def _start(
    name: str, argv: list[str], environ: Mapping[str, str], log: Path, port: int, project: Path = ROOT
) -> Server:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("DYN_", "NATS_", "VLLM_"))}
    kept = {key: value for key, value in os.environ.items() if key == "DYN_LOCAL_CACHE_DIR"}
    with log.open("wb") as output:
        popen = subprocess.Popen(
            # Of a benchmark that is killed, no server stays behind.
            [sys.executable, "-m", "dynamo_local.process.guarded", "--", *argv],
            cwd=project,
            env={**inherited, **kept, **environ, "PYTHONPATH": str(project), "DYN_PARENT_PID": str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Server(name, popen, port, log, time.monotonic())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
