"""The sides of every comparison, as processes seen from outside: vLLM's own server, and this project's, of this
checkout or of another one. They are asked by command line and HTTP only, so that any revision can be measured beside
this one."""

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
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.harness.accounting import Process, descendants, is_alive
from benchmarks.harness.client import HOST, ExchangeError, ask
from benchmarks.harness.client import ServerError as ServerError  # for those that import it from here

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "bench"
OURS, BESIDE = "ours", "beside"
"""This checkout's server, and that of the one beside."""
READY_WITHIN_S = 300.0
END_WITHIN_S = 60.0
_POLL_S = 0.05

_Side = TypeVar("_Side")

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
    checkout: Path = ROOT
    """Whose code serves."""
    model: str = ""
    processes: tuple[Process, ...] = field(default=())

    async def ready(self) -> float:
        """Wait until /health answers 200. Returns the seconds since the start."""
        deadline = time.monotonic() + READY_WITHIN_S
        while not await self._is_healthy():
            if self.ended:
                raise ServerError(f"{self.name} ended while it was starting:\n{self.last_lines()}")
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name} is not ready after {READY_WITHIN_S:g} s:\n{self.last_lines()}")
            await asyncio.sleep(_POLL_S)
        took_s = time.monotonic() - self.started_at
        self.model = json.loads(await self.get("/v1/models"))["data"][0]["id"]
        self.refresh()
        return took_s

    @property
    def ended(self) -> bool:
        """Whether the server has, by itself or by a fault."""
        return self.popen.poll() is not None

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
        if not self.ended:
            self.popen.send_signal(signal.SIGINT)
        await self.wait(END_WITHIN_S)
        self.kill()

    async def wait(self, within_s: float) -> None:
        """Wait for its end, so long at most."""
        deadline = time.monotonic() + within_s
        while not self.ended and time.monotonic() < deadline:  # noqa: ASYNC110  # a foreign process
            await asyncio.sleep(_POLL_S)  # nothing tells the event loop of a process that ended

    def kill(self) -> None:
        """Leave no process behind."""
        for process in {*self.processes, *descendants(self.popen.pid)}:
            if is_alive(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        self.popen.wait()

    async def command(self, *arguments: str, within_s: float = END_WITHIN_S) -> str:
        """What a `dynamo` command about this server, one of ours, prints. Raises ServerError if it fails."""
        asked = await asyncio.create_subprocess_exec(
            *(_dynamo(self.checkout), *arguments, f"--namespace={NAMESPACE}"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self.checkout,
            env={**_environ(), "DYN_LOCAL_STATE_DIR": str(self.state_root)},
        )
        try:
            async with asyncio.timeout(within_s):
                output, errors = await asked.communicate()
        except TimeoutError as error:
            asked.kill()
            await asked.wait()
            raise ServerError(f"dynamo {arguments[0]} takes longer than {within_s:g} s") from error
        if asked.returncode != 0:
            raise ServerError(f"dynamo {' '.join(arguments)}: {errors.decode().strip()}")
        return output.decode()

    async def dynamo(self, *arguments: str, within_s: float = END_WITHIN_S) -> Any:
        """What that command says with --json. Raises ServerError if it fails."""
        return json.loads(await self.command(*arguments, "--json", within_s=within_s))

    async def events(self, kind: str) -> list[dict[str, Any]]:
        """All events of this kind."""
        lines = await self.command("events", "--kind", kind, "-n", "1000000", "--json")
        return [json.loads(line) for line in lines.splitlines()]

    async def endpoints(self) -> dict[str, Any]:
        """The status of each endpoint; none while the server cannot be asked."""
        try:
            listed = await self.dynamo("endpoint", "list")
        except ServerError:
            return {}
        return {each["spec"]["name"]: each["status"] for each in listed}

    async def get(self, path: str) -> bytes:
        """The body of the answer. Raises ExchangeError if its status is not 200."""
        return await ask(self.port, "GET", path)

    async def post(self, path: str, fields: Mapping[str, Any]) -> Any:
        """The answer, as JSON. Raises ExchangeError if its status is not 200."""
        return json.loads(await ask(self.port, "POST", path, fields))

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
    return _start("vLLM", argv, environ, folder / "vllm.log", port, ROOT)


def start_ours(
    folder: Path,
    model: str,
    graph: str,
    overrides: Mapping[str, Any],
    options: Sequence[str] = (),
    checkout: Path = ROOT,
) -> Server:
    """`dynamo serve` of one of the example graphs ("agg", "agg_router"). `folder`: of its own, made if need be.
    `options`: further ones of its own. `checkout`: whose code serves."""
    settings = {f"VllmWorker.{key}": value for key, value in engine_settings(model).items()} | dict(overrides)
    argv = [f"examples.llm.graphs.{graph}:Frontend", "-f", f"examples/llm/configs/{graph}.yaml", "--model", model]
    argv += [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()]
    return _start_ours(folder, [*argv, *options], checkout)


def start_endpoints(
    folder: Path, specs: Sequence[Mapping[str, Any]], options: Sequence[str] = (), checkout: Path = ROOT
) -> Server:
    """`dynamo serve` of these endpoints. The other parameters are those of `start_ours`."""
    folder.mkdir(exist_ok=True)
    file = folder / "endpoints.yaml"
    # JSON is YAML.
    file.write_text(json.dumps({"endpoints": list(specs)}, indent=2))
    return _start_ours(folder, ["-f", str(file), *options], checkout)


async def serve_again(server: Server, options: Sequence[str] = ()) -> None:
    """Start another server in the place of one that was killed, once that has ended, with the same endpoints."""
    await server.wait(END_WITHIN_S)
    successor = _start_ours(server.log.parent, options, server.checkout, server.port)
    server.popen, server.started_at, server.processes = successor.popen, successor.started_at, ()


def _start_ours(folder: Path, arguments: Sequence[str], checkout: Path, port: int | None = None) -> Server:
    folder.mkdir(exist_ok=True)
    port = port or _free_port()
    argv = [_dynamo(checkout), "serve", f"--port={port}", f"--namespace={NAMESPACE}", *arguments]
    state_root = folder / "state"
    environ = {**ENGINE_ENVIRONMENT, "DYN_LOCAL_STATE_DIR": str(state_root)}
    if not Path("/dev/nvidiactl").exists():
        # Two sides of a comparison may be there at the same time, on the same cores.
        environ["DYN_CPU_SLOTS"] = str(len(os.sched_getaffinity(0)))
    server = _start(OURS if checkout == ROOT else BESIDE, argv, environ, folder / "ours.log", port, checkout)
    server.state_root = state_root
    return server


def _dynamo(checkout: Path) -> str:
    """The command of a checkout: of its own .venv, as `make setup` makes it; of this one, beside its Python."""
    return str(Path(sys.executable).with_name("dynamo") if checkout == ROOT else checkout / ".venv/bin/dynamo")


def add_beside(parser: argparse.ArgumentParser) -> None:
    """An option to measure another revision as well, in turns with this one."""
    parser.add_argument(
        "--beside", type=_checkout, metavar="CHECKOUT", help="measure that revision as well, in turns with this one"
    )


def add_project(parser: argparse.ArgumentParser) -> None:
    """An option to measure another revision instead of this one."""
    parser.add_argument("--project", type=_checkout, default=ROOT, metavar="CHECKOUT", help="whose code serves (this)")


def _checkout(text: str) -> Path:
    checkout = Path(text).resolve()
    if not Path(_dynamo(checkout)).exists():
        raise argparse.ArgumentTypeError(f"{checkout} has no .venv/bin/dynamo; run make setup there")
    return checkout


def sides_of(arguments: argparse.Namespace) -> dict[str, Path]:
    """The checkouts to measure, by what they are called."""
    return {OURS: ROOT} | ({BESIDE: arguments.beside} if arguments.beside else {})


def in_turn(sides: Iterable[_Side], number: int) -> list[_Side]:
    """Return the sides in the order of this round. ABBA: whatever drifts favours neither."""
    return list(sides)[:: -1 if number % 2 else 1]


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


def spread_over_cores(servers: Sequence[Server], engine_core: int) -> None:
    """The same place for both sides: their engines on one core, all else (and this client) on the others.

    vLLM's EngineCore waits for its Worker by polling. On the Worker's core it yields to it; on another core it would
    use that up, at the cost of everything else there.
    """
    rest = os.sched_getaffinity(0) - {engine_core} or {engine_core}
    for server in servers:
        engine = {*server.of_role("EngineCore"), *server.of_role("Worker")}
        for process in server.processes:
            _bind(process.pid, {engine_core} if process in engine else rest)
    os.sched_setaffinity(0, rest)


def _bind(pid: int, cores: set[int]) -> None:
    with contextlib.suppress(OSError):  # it, or a thread of it, has ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)


def _start(name: str, argv: Sequence[str], environ: Mapping[str, str], log: Path, port: int, checkout: Path) -> Server:
    with log.open("wb") as output:
        popen = subprocess.Popen(
            # Of a benchmark that is killed, no server stays behind.
            ["setpriv", "--pdeathsig", "KILL", *argv],
            cwd=checkout,
            env={**_environ(), **environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Server(name, popen, port, log, time.monotonic(), checkout=checkout)


def _environ() -> dict[str, str]:
    """This process's variables without those that say what a server does, or whose code it runs."""
    own = ("DYN_", "NATS_", "VLLM_", "PYTHONPATH", "VIRTUAL_ENV")
    return {key: value for key, value in os.environ.items() if key == "DYN_LOCAL_CACHE_DIR" or not key.startswith(own)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
