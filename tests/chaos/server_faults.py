"""`python -m tests.chaos.server_faults`: faults under load, every third of which kills or stops `dynamo serve` itself,
in the middle of changes of what runs. A server that was killed is started again on its files.

Clients judge every token, also of answers that a killed server has cut off. Meanwhile the statefile is read again and
again: it is whole, and holds no device twice. After each start nothing of the server before is left, and all workers
become ready. The exit code is 1 if anything was not so.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import DRAIN_WORKER, LIST_WORKERS, RESTART_WORKERS, SCALE
from dynamo_local.core.errors import DynamoError, NotRunningError
from dynamo_local.process.forkserver.protocol import IMPORTED_ENV
from state.machine.processes import Process
from state.statefile.store import StateStore
from state.statefile.transitions import shares_taken
from tests.chaos.answers import Outcome
from tests.chaos.faults import Done, Kind
from tests.chaos.http_clients import HttpClients
from tests.chaos.judges import GREEDY, SAMPLINGS, Got, Question, SameTokens
from tests.chaos.machinery import machinery_of, resume
from tests.chaos.processes import ServerProcesses, descendants, identity_of, send
from tests.e2e.llm_server import LlmServer, none_of
from tests.imported import importing
from tests.integration.server_process import eventually

NAMESPACE = "chaos"
_WORKERS, _MOST_WORKERS = 3, 4
_KINDS = (Kind.KILL_WORKER, Kind.STOP_WORKER, Kind.DRAIN_WORKER, Kind.KILL_ROUTER, Kind.KILL_BUS, Kind.KILL_CIRCUSD)
_WEIGHTS = (6, 4, 2, 1, 1, 1)
_SERVICES = {Kind.KILL_ROUTER: f"{NAMESPACE}_Router", Kind.KILL_BUS: f"{NAMESPACE}_Nats"}
_SIGNALS = {Kind.STOP_WORKER: signal.SIGSTOP, Kind.DRAIN_WORKER: signal.SIGTERM}
"""Of faults that do not kill."""
_STALL_S, _SETTLE_S = 180.0, 240.0
_LOOK_EVERY_S = 0.02
_SERVER_KILLED, _SERVER_STOPPED = "dynamo serve killed", "dynamo serve stopped for a while"


class Clients(HttpClients):
    """Clients of a server that is killed at times: what they have got by then has to be right."""

    def __init__(self, seed: int, samplings: Sequence[Mapping[str, Any]]) -> None:
        super().__init__("http://127.0.0.1", seed, _STALL_S, gap_slack_s=_STALL_S)
        self._judge = SameTokens(seed, samplings)
        self.cut_off = 0
        self._up = asyncio.Event()
        self._killed_at = 0.0

    def reach(self, url: str) -> None:
        """Ask this server from now on."""
        self._http.base_url = httpx.URL(url)
        self._up.set()

    def note_kill(self) -> None:
        """Wait for the next server."""
        self._up.clear()
        self._killed_at = time.monotonic()

    async def _ask_and_judge(self, question: Question, leaves_after: int | None, salt: str) -> None:
        await self._up.wait()
        await super()._ask_and_judge(question, leaves_after, salt)

    async def _judge_error(self, question: Question, got: Got, reason: str) -> tuple[Outcome, str]:
        if self._killed_at < got.asked_at:
            return await super()._judge_error(question, got, reason)
        self.cut_off += 1
        return await self._judge.judge(question, got, True)


class Run:
    """Servers, one after the other, and what is done to them."""

    def __init__(self, root: Path, engine: str, seed: int) -> None:
        self._root = root
        self._engine = engine
        self._random = random.Random(f"{seed} server faults")
        self.clients = Clients(seed, (GREEDY,) if engine == "mocker" else SAMPLINGS)
        self.counts: Counter[str] = Counter()
        self.orders: Counter[str] = Counter()
        self.reads = 0
        self.defects: list[str] = []
        self._over = False

    def server(self) -> LlmServer:
        options = [
            "examples.llm.graphs.agg_router:Frontend",
            "--file=examples/llm/configs/agg_router.yaml",
            f"--cpu-slots={_MOST_WORKERS}",
            f"--VllmWorker.ServiceArgs.workers={_WORKERS}",
            "--model=random",
            "--restart-backoff-max=0.5",
        ]
        if self._engine == "mocker":
            options += ["--VllmWorker.engine=mocker", "--VllmWorker.mocker-step-base-ms=10"]
        else:
            options += ["--VllmWorker.dtype=float32", "--VllmWorker.kv-transfer=true"]
        return LlmServer(self._root, NAMESPACE, options)

    async def run(self, faults: int, streams: int) -> None:
        """Inject so many faults, in as many lives of the server as that takes."""
        reading: asyncio.Task[None] | None = None
        killed = True
        try:
            while killed:
                with self.server() as server:
                    await asyncio.to_thread(server.await_ready)
                    self.clients.reach(server.url)
                    if reading is None:
                        print(f"{await self.clients.learn_answers()} questions have one answer", flush=True)
                        self.clients.open_streams(streams)
                        reading = asyncio.create_task(self._read_statefile(server))
                    killed = await self._one_life(server, faults)
                    if not killed:
                        await self._end(server)
        finally:
            self._over = True
            if reading is not None:
                await reading
            await self.clients.close()

    async def _one_life(self, server: LlmServer, faults: int) -> bool:
        """Go on until the server is killed, or there were enough faults. Returns whether it was killed."""
        await self._await_workers(server)
        while (done := self.counts.total()) < faults:
            await asyncio.sleep(self._random.expovariate(2.0))
            if server.process.poll() is not None:
                raise AssertionError(f"the server has ended by itself: {server.output}")
            if done % 3 != 2:
                await self._hit_a_part(server)
                continue
            await asyncio.to_thread(self._order, server)
            await asyncio.sleep(self._random.random() * 1.5)
            if self._random.random() < 0.5:
                await self._stop(server)
                continue
            await self._kill(server)
            return True
        return False

    async def _hit_a_part(self, server: LlmServer) -> None:
        kind = self._random.choices(_KINDS, _WEIGHTS)[0]
        process = await asyncio.to_thread(self._target, kind, server)
        if process is None:
            return
        seconds = 0.2 + 2.8 * self._random.random() ** 2
        hit = [process, *descendants(process.pid)] if kind is Kind.STOP_WORKER else [process]
        # sum, not any: all of them must be signalled.
        if not sum(send(each, _SIGNALS.get(kind, signal.SIGKILL)) for each in hit):
            return
        if kind is Kind.STOP_WORKER:
            await resume(hit, seconds)
        self.clients.record_fault(Done(0.0, kind.value, "", seconds, kind))
        self.counts[kind.value] += 1

    def _target(self, kind: Kind, server: LlmServer) -> Process | None:
        if kind is Kind.KILL_CIRCUSD:
            return machinery_of(server.process.pid, server.paths, None).circusd()
        processes = ServerProcesses(server.paths).by_watcher()
        if kind in _SERVICES:
            return processes.get(_SERVICES[kind])
        workers = sorted(name for name in processes if name.startswith(f"{NAMESPACE}_VllmWorker"))
        return processes[self._random.choice(workers)] if len(workers) > 1 else None

    def _order(self, server: LlmServer) -> None:
        """Have something be changed when the server is hit."""
        asked, client = self._random.choice((SCALE, SCALE, RESTART_WORKERS, DRAIN_WORKER)), ControlClient(server.paths)
        try:
            rows = client.do(LIST_WORKERS)["data"]
            workers = [row["watcher"] for row in rows if row["role"] == "aggregated" and row["state"] != "stopped"]
            if asked is SCALE:
                client.do(SCALE, {"targets": {"VllmWorker": self._random.randint(2, _MOST_WORKERS)}})
            elif asked is RESTART_WORKERS:
                client.do(RESTART_WORKERS, {"name": self._random.choice(workers)})
            else:
                client.do(DRAIN_WORKER, {}, watcher=self._random.choice(workers))
        except DynamoError as error:
            self.orders[f"{asked.name}: {type(error).__name__}"] += 1
        else:
            self.orders[f"{asked.name}: taken"] += 1

    async def _stop(self, server: LlmServer) -> None:
        serve = identity_of(server.process.pid)
        if serve is not None and send(serve, signal.SIGSTOP):
            self.counts[_SERVER_STOPPED] += 1
            await resume([serve], 0.4 + 11.6 * self._random.random() ** 2)

    async def _kill(self, server: LlmServer) -> None:
        tree = server.tree()
        self.clients.note_kill()
        server.process.kill()
        self.counts[_SERVER_KILLED] += 1
        try:
            await asyncio.to_thread(eventually, lambda: none_of(tree), "processes of a killed server")
        except AssertionError:
            left = [pid for pid, started in tree.items() if not none_of({pid: started})]
            self.defects.append(f"processes left of a killed server: {left}")

    async def _await_workers(self, server: LlmServer) -> None:
        try:
            await asyncio.to_thread(server.await_workers, _WORKERS)
        except AssertionError as error:
            self.defects.append(str(error))

    async def _end(self, server: LlmServer) -> None:
        """Wait for the last answers, and check what is held."""
        if unanswered := await self.clients.close_streams(_STALL_S + _SETTLE_S):
            self.defects.append(f"{unanswered} requests got no answer")
        deadline = time.monotonic() + _SETTLE_S
        while left := self._half_done(server):
            if time.monotonic() > deadline:
                self.defects.append(f"not settled: {left}")
                break
            await asyncio.sleep(0.2)
        server.signal(signal.SIGTERM)
        code = await asyncio.to_thread(server.end)
        if code != 0:
            self.defects.append(f"the server ended with {code}: {server.lines[-5:]}")
        self.defects += self.clients.results.defects

    def _half_done(self, server: LlmServer) -> list[str]:
        with suppress(DynamoError):
            state = server.state()
            held = {name: c for name, c in state.components.items() if c.devices}
            dead = set(held) - ServerProcesses(server.paths).by_watcher().keys()
            return [f"{name} is {c.phase or 'dead'}" for name, c in held.items() if c.phase or name in dead]
        return ["the statefile cannot be read"]

    async def _read_statefile(self, server: LlmServer) -> None:
        store = StateStore(server.paths)
        while not self._over:
            try:
                state = await asyncio.to_thread(store.read_file)
            except NotRunningError:
                pass
            except DynamoError as error:
                self.defects.append(f"the statefile is not valid: {error}")
            else:
                self.reads += 1
                if twice := {device: share for device, share in shares_taken(state).items() if share > 1}:
                    self.defects.append(f"devices held twice: {twice}")
            await asyncio.sleep(_LOOK_EVERY_S)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.server_faults", description=__doc__)
    parser.add_argument("--engine", choices=("mocker", "vllm"), default="mocker")
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="default: random")
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, importing(os.environ) as path:
        os.environ[IMPORTED_ENV] = str(path)
        eventually(lambda: path.exists(), "vLLM is imported")
        run = Run(Path(folder) / "state", options.engine, options.seed)
        asyncio.run(run.run(options.faults, options.streams))
    results = run.clients.results
    print(f"{sum(run.counts.values())} faults in {time.monotonic() - begun:.0f} s: {dict(run.counts)}")
    print(f"orders under way: {dict(run.orders)}; {run.reads} reads of the statefile")
    print(f"{results.requests} requests, {results.tokens} tokens, {run.clients.cut_off} cut off: {results.outcomes}")
    for line in [*results.failures, *run.defects][:40]:
        print(f"DEFECT  {line}")
    print("NOT GOOD" if run.defects else "good")
    return 1 if run.defects else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
