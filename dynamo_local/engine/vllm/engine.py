"""A vLLM engine in the hands of a worker: the engine core in processes of its own, without vLLM's frontend."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dynamo_local.core.errors import EngineError, RequestError
from dynamo_local.core.messages import EngineInfo, PinAnswer, PinQuestion, RequestEpoch, Submit, TokenDelta
from dynamo_local.core.ports import MissingPrefix, Progress, PulledPrefix, Step
from dynamo_local.engine.vllm.arguments import engine_schema, to_argv
from dynamo_local.engine.vllm.core_methods import name_of
from dynamo_local.engine.vllm.environment import CPU_CORES_ENV, prepare_environment
from dynamo_local.engine.vllm.prefix_pull import PrefixPull
from dynamo_local.engine.vllm.transfer import Description
from dynamo_local.runtime.processes import prepare_forks


@dataclass
class _Live:
    current: RequestEpoch
    position: int
    hold_s: float
    pulling: bool
    """It may still be reading another engine's blocks."""


class VllmEngine:
    """Implements `core.ports.Engine`.

    `config` holds keys of `arguments.engine_schema()`; others are ignored. `private_dir`: see environment.py.
    `kv_transfer`: whether KV blocks can be pulled from this engine, and by it.
    """

    def __init__(self, config: dict[str, Any], private_dir: Path, *, kv_transfer: bool = False) -> None:
        self._config = config
        self._private_dir = private_dir
        self._kv_transfer = kv_transfer
        self._pull: PrefixPull | None = None
        self._live: dict[str, _Live] = {}
        self._held: dict[str, float] = {}
        """Finished requests whose blocks are held, and until when."""
        # One thread for the engine's whole life: its processes are forked from it, and the kernel kills them when the
        # thread that forked them ends (runtime/processes.py).
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm-engine")
        self._core: Any = None
        self._max_model_len = 0

    async def start(self, progress: Progress) -> EngineInfo:
        loop = asyncio.get_running_loop()
        prepare_environment(self._private_dir)
        try:
            launched = await loop.run_in_executor(self._thread, _launch, self._config, self._kv_transfer, progress)
            self._core, vllm_config = launched
            if self._kv_transfer:
                self._pull = await _open_pull(self._core, vllm_config)
        except EngineError:
            raise
        except (Exception, SystemExit) as error:
            # vLLM has no error tree for start-up, and its argument parser exits.
            raise EngineError(f"vLLM cannot start: {_one_line(error)}", "the worker's log has the details") from error
        info = _info(vllm_config)
        self._max_model_len = info.max_model_len
        return info

    async def submit(self, work: Submit, pulled: PulledPrefix | None = None) -> None:
        from dynamo_local.engine.vllm.wire import core_request_of

        if len(work.token_ids) >= self._max_model_len:
            # The frontend goes by the model's configuration; an engine may have settled for less, by its memory.
            raise RequestError(
                f"{len(work.token_ids)} tokens leave no room for an answer in this worker's {self._max_model_len}"
            )
        transfer = self._pull.params_of(work, pulled) if self._pull is not None else None
        request = core_request_of(work, transfer)
        current = RequestEpoch(work.request_id, work.epoch)
        self._live[request.request_id] = _Live(current, work.position, work.hold_s, pulled is not None)
        await self._core.add_request_async(request)

    async def cancel(self, requests: Sequence[RequestEpoch]) -> None:
        names = [str(request) for request in requests]
        dropped = {name: live for name in names if (live := self._live.pop(name, None)) is not None}
        if dropped:
            await self._core.abort_requests_async(list(dropped))
        # One that was running here may have finished, and be held, in the engine core.
        held = [name for name in names if self._held.pop(name, None) or (name in dropped and dropped[name].hold_s > 0)]
        if self._pull is not None and held:
            self._pull.release(holds=held)
        if self._pull is not None and any(live.pulling for live in dropped.values()):
            # Whoever has cancelled may unpin: not before these requests can count as read no more.
            await self._pull.settle()

    async def missing(self, token_ids: Sequence[int], cache_salt: str | None) -> MissingPrefix | None:
        return None if self._pull is None else await self._pull.missing(token_ids, cache_salt)

    async def pin(self, question: PinQuestion) -> PinAnswer:
        if self._pull is None:
            return PinAnswer(blocks=0, refused="the engine is not set up for KV transfer")
        return await self._pull.pin(question)

    async def unpin(self, pins: Sequence[str]) -> None:
        if self._pull is not None:
            self._pull.release(pins=pins)

    async def step(self) -> Step:
        from vllm.v1.engine.exceptions import EngineDeadError

        from dynamo_local.engine.vllm.wire import load_of

        try:
            outputs = await self._core.get_output_async()
        except EngineDeadError as error:
            raise EngineError("vLLM's engine process died", "the worker's log has the details") from error
        deltas = tuple(delta for delta in map(self._stamp, outputs.outputs) if delta is not None)
        return Step(outputs.timestamp, deltas, load_of(outputs.scheduler_stats, keeps=self._pull is not None))

    async def close(self, deadline_s: float) -> None:
        if self._pull is not None:
            self._pull.close()
        if self._core is not None:
            core, self._core = self._core, None
            await asyncio.get_running_loop().run_in_executor(self._thread, core.shutdown, deadline_s)
        self._thread.shutdown(wait=False)

    def _stamp(self, output: Any) -> TokenDelta | None:
        from dynamo_local.engine.vllm.wire import delta_of

        live = self._live.get(output.request_id)
        if live is None:
            return None
        delta = delta_of(output, live.current, live.position)
        live.position += len(delta.token_ids)
        live.pulling = False
        if delta.finish is not None:
            del self._live[output.request_id]
            if live.hold_s > 0 and self._pull is not None:
                self._hold(self._pull, output.request_id, live.hold_s)
        return delta

    def _hold(self, pull: PrefixPull, name: str, hold_s: float) -> None:
        now = time.monotonic()
        self._held = {other: end for other, end in self._held.items() if end > now}
        self._held[name] = now + hold_s
        pull.watch(now + hold_s)


def _launch(config: dict[str, Any], kv_transfer: bool, progress: Progress) -> tuple[Any, Any]:
    """Import vLLM, start its engine core, and wait until that has loaded the model."""
    progress("importing vLLM")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor.abstract import Executor

    progress("reading the model's configuration")
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args = AsyncEngineArgs.from_cli_args(parser.parse_args(to_argv(config, engine_schema())))
    if kv_transfer:
        args.kv_transfer_config = _transfer_config(args.kv_transfer_config)
    vllm_config = args.create_engine_config()
    if current_platform.is_cpu():
        # Creating the configuration has just forced "spawn", which imports vLLM anew in every process. Nothing that
        # forbids forking (OpenMP threads, a CUDA context) has started yet, and forked processes need no import.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        if cores := os.environ.get(CPU_CORES_ENV):
            # Of this thread, and so of the engine's processes, which are forked from it: vLLM binds spawned ones only.
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    prepare_forks()
    progress("loading the model")
    core = EngineCoreClient.make_async_mp_client(
        vllm_config=vllm_config, executor_class=Executor.get_class(vllm_config), log_stats=True
    )
    return core, vllm_config


def _transfer_config(configured: Any) -> Any:
    """Of vLLM, for prefix pull. Raises EngineError."""
    from vllm.config import KVTransferConfig

    if configured is not None:
        raise EngineError("kv-transfer and kv-transfer-config exclude each other", "leave one of them out")
    # Buffers are on the engine's own device, and every start makes an engine id of its own: vLLM's defaults.
    return KVTransferConfig(
        kv_connector="PrefixPullConnector",
        kv_connector_module_path="dynamo_local.engine.vllm.pull_connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            # What is known of engines that nobody has read from for so long, dead ones mostly, is forgotten.
            "engine_ttl": 300.0,
            # Threads that share the work of many small reads: more than there is, on one machine.
            "num_threads": 0,
        },
    )


async def _open_pull(core: Any, vllm_config: Any) -> PrefixPull:
    from dynamo_local.engine.vllm.block_hashes import BlockHasher
    from dynamo_local.engine.vllm.identity import fingerprint, model_identity

    description = msgspec.convert(await core.call_utility_async(name_of("describe")), Description)
    model = await asyncio.to_thread(model_identity, vllm_config.model_config)
    hasher = BlockHasher(vllm_config.cache_config)
    return PrefixPull(core, description, fingerprint(description.identity, model), hasher)


def _info(vllm_config: Any) -> EngineInfo:
    """What the engine came up with: the client has written the engine's own figures into the configuration."""
    return EngineInfo(
        engine="vllm",
        model=vllm_config.model_config.served_model_name,
        max_model_len=vllm_config.model_config.max_model_len,
        block_size=vllm_config.cache_config.block_size,
        kv_blocks=vllm_config.cache_config.num_gpu_blocks,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
    )


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:400] or type(error).__name__
