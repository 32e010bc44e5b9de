"""Starts vLLM's engine core, in processes that are forked or spawned from the calling thread."""

from __future__ import annotations

import os
from typing import Any

from dynamo_local.core.errors import EngineError
from dynamo_local.core.ports import Progress
from dynamo_local.engine.vllm.adapters import AdapterSettings
from dynamo_local.engine.vllm.arguments import engine_schema, to_argv
from dynamo_local.engine.vllm.engine_threads import EngineThreads, SoftBinding
from dynamo_local.engine.vllm.environment import (
    compile_nothing,
    leave_memory_where_it_is,
    settle_threads,
    start_ranks_on_their_slots,
)
from dynamo_local.engine.vllm.torch_groups import share_process_groups
from dynamo_local.engine.vllm.transfer import HOST_PID
from dynamo_local.engine.vllm.wakeups import wait_without_spinning
from dynamo_local.runtime.processes import let_forks_lead_sessions, prepare_forks
from dynamo_local.sdk.schema import build_settings


def launch(
    config: dict[str, Any], kv_transfer: bool, threads: EngineThreads, binding: SoftBinding | None, progress: Progress
) -> tuple[Any, Any, Any]:
    """Import vLLM, start its engine core, and wait until that has loaded the model. Returns vLLM's client of it, its
    configuration and its adapters."""
    progress("importing vLLM")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor.abstract import Executor

    from dynamo_local.engine.vllm.continuing import install
    from dynamo_local.engine.vllm.lora import Adapters

    progress("reading the model's configuration")
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args = AsyncEngineArgs.from_cli_args(parser.parse_args(to_argv(config, engine_schema())))
    configured = build_settings(AdapterSettings, "the engine", config).adapters
    adapters = Adapters(configured, enabled=bool(args.enable_lora))
    if current_platform.is_cpu():
        adapters.make_room(args)
    if kv_transfer:
        args.kv_transfer_config = _transfer_config(args.kv_transfer_config)
    vllm_config = args.create_engine_config()
    if current_platform.is_cpu():
        # Creating the configuration has just forced "spawn", which imports vLLM anew in every process. Nothing that
        # forbids forking (OpenMP threads, a CUDA context) has started yet, and forked processes need no import.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        leave_memory_where_it_is()
        wait_without_spinning()
        share_process_groups()
        if vllm_config.model_config.enforce_eager:
            compile_nothing()
        if binding is not None:
            # Of the engine's processes, which are forked from here: vLLM binds spawned ones only.
            binding.bind_forks()
            start_ranks_on_their_slots()
            # Who computes without a pause, and who is awake for moments: the kernel is to tell them apart.
            let_forks_lead_sessions()
    # OpenMP's number of threads belongs to a thread, and the engine's processes are forked from this one.
    settle_threads(os.environ)
    prepare_forks()
    threads.forked_here()
    # For processes that are forked; those that are spawned load plugin.py.
    install()
    progress("loading the model")
    core = EngineCoreClient.make_async_mp_client(
        vllm_config=vllm_config, executor_class=Executor.get_class(vllm_config), log_stats=True
    )
    return core, vllm_config, adapters


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
            HOST_PID: os.getpid(),
        },
    )
