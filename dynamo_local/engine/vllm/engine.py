"""A vLLM engine in the hands of a worker: the engine core in processes of its own, without vLLM's frontend."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_local.core.errors import EngineError, RequestError
from dynamo_local.core.messages import EngineInfo, RequestEpoch, Submit, TokenDelta
from dynamo_local.core.ports import Progress, Step
from dynamo_local.engine.vllm.arguments import engine_schema, to_argv
from dynamo_local.engine.vllm.environment import CPU_CORES_ENV, prepare_environment
from dynamo_local.runtime.processes import prepare_forks


@dataclass
class _Live:
    current: RequestEpoch
    position: int


class VllmEngine:
    """Implements `core.ports.Engine`.

    `config` holds keys of `arguments.engine_schema()`; others are ignored. `private_dir`: see environment.py.
    """

    def __init__(self, config: dict[str, Any], private_dir: Path) -> None:
        self._config = config
        self._private_dir = private_dir
        self._live: dict[str, _Live] = {}
        # One thread for the engine's whole life: its processes are forked from it, and the kernel kills them when the
        # thread that forked them ends (runtime/processes.py).
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm-engine")
        self._core: Any = None
        self._max_model_len = 0

    async def start(self, progress: Progress) -> EngineInfo:
        loop = asyncio.get_running_loop()
        prepare_environment(self._private_dir)
        try:
            self._core, info = await loop.run_in_executor(self._thread, _launch, self._config, progress)
        except EngineError:
            raise
        except (Exception, SystemExit) as error:
            # vLLM has no error tree for start-up, and its argument parser exits.
            raise EngineError(f"vLLM cannot start: {_one_line(error)}", "the worker's log has the details") from error
        self._max_model_len = info.max_model_len
        return info

    async def submit(self, work: Submit) -> None:
        from dynamo_local.engine.vllm.wire import core_request_of

        if len(work.token_ids) >= self._max_model_len:
            # The frontend goes by the model's configuration; an engine may have settled for less, by its memory.
            raise RequestError(
                f"{len(work.token_ids)} tokens leave no room for an answer in this worker's {self._max_model_len}"
            )
        request = core_request_of(work)
        self._live[request.request_id] = _Live(RequestEpoch(work.request_id, work.epoch), work.position)
        await self._core.add_request_async(request)

    async def cancel(self, requests: Sequence[RequestEpoch]) -> None:
        known = [str(request) for request in requests if self._live.pop(str(request), None) is not None]
        if known:
            await self._core.abort_requests_async(known)

    async def step(self) -> Step:
        from vllm.v1.engine.exceptions import EngineDeadError

        from dynamo_local.engine.vllm.wire import load_of

        try:
            outputs = await self._core.get_output_async()
        except EngineDeadError as error:
            raise EngineError("vLLM's engine process died", "the worker's log has the details") from error
        deltas = tuple(delta for delta in map(self._stamp, outputs.outputs) if delta is not None)
        return Step(outputs.timestamp, deltas, load_of(outputs.scheduler_stats))

    async def close(self, deadline_s: float) -> None:
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
        if delta.finish is not None:
            del self._live[output.request_id]
        return delta


def _launch(config: dict[str, Any], progress: Progress) -> tuple[Any, EngineInfo]:
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
    return core, _info(vllm_config)


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
