"""What is replaced in private code of vLLM and its libraries, or rests on it, and what that code is taken to be.

With the version that the contract tests hold, nothing is looked at. With any other one each part is looked at before it
is touched; what is not as expected is told in one line, and either done without or refused.

A part is written `module:name`, and has to be there. `module:name(a, b)`: a function with exactly these parameters,
whose place another one takes. `module:name(a, b, ...)`: with these among others; it is called. `module~text`: its
source has this text.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamo_local.core.errors import EngineError

TESTED: Final = "0.32.0"
"""Of vLLM: what pyproject.toml installs."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patch:
    parts: tuple[str, ...]
    without: str | None = None
    """What is done if it does not apply. None: nothing works then."""
    of: str = "vLLM"
    """Whose private code it is."""


_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
_CONNECTOR = f"{_NIXL}.connector:NixlBaseConnector"
_SCHEDULER = f"{_NIXL}.pull_scheduler:NixlPullConnectorScheduler"
_WORKER = f"{_NIXL}.pull_worker:NixlPullConnectorWorker"
_CLIENT = "vllm.v1.engine.core_client:EngineCoreClient"
_SAMPLER = "vllm.v1.sample.sampler:Sampler"
_GRAMMARS = "vllm.v1.structured_output:StructuredOutputManager"
_SHM = "vllm.distributed.device_communicators.shm_broadcast"

REPLACEMENTS: Final[Mapping[str, Patch]] = {
    "starting engines": Patch(
        (
            "vllm.engine.arg_utils:AsyncEngineArgs.from_cli_args(args)",
            "vllm.engine.arg_utils:AsyncEngineArgs.add_cli_args(parser, ...)",
            "vllm.engine.arg_utils:AsyncEngineArgs.create_engine_config(self, ...)",
            "vllm.utils.argparse_utils:FlexibleArgumentParser",
            f"{_CLIENT}.make_async_mp_client(vllm_config, executor_class, log_stats, ...)",
            "vllm.v1.executor.abstract:Executor.get_class(vllm_config)",
            "vllm.lora.request:LoRARequest",
            "vllm.lora.utils:get_adapter_absolute_path(lora_path)",
        )
    ),
    "requests and outputs": Patch(
        (
            "vllm.v1.engine:EngineCoreRequest.prompt_token_ids",
            "vllm.v1.engine:EngineCoreRequest.sampling_params",
            "vllm.v1.engine:EngineCoreOutput.new_token_ids",
            "vllm.v1.engine:EngineCoreOutput.finish_reason",
            "vllm.v1.engine:EngineCoreOutputs.scheduler_stats",
            "vllm.v1.engine:FinishReason",
            "vllm.v1.engine.exceptions:EngineDeadError",
            "vllm.sampling_params:SamplingParams.extra_args",
        )
    ),
    "continuing requests": Patch(
        (
            "vllm.v1.request:Request.from_engine_core_request(request, block_hasher)",
            "vllm.v1.request:Request.append_output_token_ids(self, token_ids)",
            "vllm.v1.request:Request.take_prefill_stats(self)",
            "vllm.v1.structured_output:StructuredOutputManager._create_grammar(self, request)",
            "vllm.v1.structured_output:StructuredOutputManager.accept_tokens(self, request, new_token_ids)",
            "vllm.v1.structured_output.request:StructuredOutputRequest.reasoning_ended",
            "vllm.v1.worker.gpu_input_batch:CachedRequestState.__post_init__(self)",
            "vllm.v1.worker.gpu_input_batch:CachedRequestState.generator",
            "vllm.config:VllmConfig.use_v2_model_runner",
            "vllm.config:ModelConfig.use_fp64_gumbel",
        )
    ),
    "the frontend's engine": Patch(
        (
            f"{_CLIENT}.make_async_mp_client",
            "vllm.v1.engine.async_llm:AsyncLLM.from_vllm_config(vllm_config, disable_log_stats, ...)",
            "vllm.v1.engine.output_processor:OutputProcessor.process_outputs(self, engine_core_outputs, ...)",
            "vllm.v1.engine.output_processor:OutputProcessor.abort_requests(self, request_ids, internal)",
            "vllm.v1.engine.output_processor~self.request_states",
            "vllm.exceptions:GracefulHTTPError",
            "vllm.exceptions:VLLMClientError",
            "vllm.entrypoints.launchers.app:build_app(args, supported_tasks, model_config, ...)",
            "vllm.entrypoints.launchers.api_server.app_state:init_app_state"
            "(engine_client, state, args, supported_tasks)",
            "vllm.entrypoints.launchers.launcher:NoSignalServer",
            "vllm.entrypoints.launchers.cli_args:make_arg_parser(parser)",
            "vllm.entrypoints.launchers.cli_args:validate_parsed_serve_args(args)",
        )
    ),
    "KV transfer": Patch(
        (
            "vllm.config:KVTransferConfig",
            "vllm.v1.engine.core:EngineCoreProc._invoke_utility_method(name, get_result, output, enqueue_output)",
            "vllm.v1.core.block_pool:BlockPool.touch(self, blocks)",
            "vllm.v1.core.block_pool:BlockPool.free_blocks(self, ordered_blocks)",
            "vllm.v1.core.block_pool:BlockPool.get_cached_block(self, block_hash, kv_cache_group_ids)",
            "vllm.v1.core.block_pool~self.cached_block_hash_to_block",
            "vllm.v1.core.kv_cache_utils:get_request_block_hasher(hash_block_size, caching_hash_fn)",
            "vllm.v1.core.kv_cache_utils:make_block_hash_with_group_id(block_hash, group_id)",
            "vllm.v1.core.kv_cache_utils:init_none_hash(hash_fn)",
            "vllm.v1.core.sched.scheduler:Scheduler.get_kv_connector(self)",
            "vllm.v1.core.sched.scheduler:Scheduler.make_stats(self, kv_connector_stats, ...)",
            "vllm.v1.kv_cache_interface:FullAttentionSpec",
            "vllm.v1.kv_cache_interface:MLAAttentionSpec",
            f"{_CONNECTOR}.start_load_kv(self, forward_context, kwargs)",
            f"{_CONNECTOR}.get_kv_connector_stats(self)",
            f"{_CONNECTOR}.build_kv_connector_stats(data)",
            f"{_CONNECTOR}.build_connector_worker_meta(self)",
            f"{_CONNECTOR}.bind_gpu_block_pool(self, gpu_block_pool)",
            f"{_NIXL}.metadata:NixlAgentMetadata",
            f"{_NIXL}.metadata:NixlHandshakePayload.compatibility_hash",
            f"{_NIXL}.metadata:NixlConnectorMetadata.add_new_req_to_recv"
            "(self, request_id, local_block_ids, kv_transfer_params, ...)",
            f"{_SCHEDULER}.build_connector_meta(self, scheduler_output)",
            f"{_SCHEDULER}.get_num_new_matched_tokens(self, request, num_computed_tokens)",
            f"{_SCHEDULER}.update_state_after_alloc"
            "(self, request, blocks, num_external_tokens)",
            f"{_SCHEDULER}.update_connector_output(self, connector_output)",
            f"{_SCHEDULER}.request_finished(self, request, block_ids)",
            f"{_SCHEDULER}.set_xfer_handshake_metadata(self, metadata)",
            f"{_WORKER}.start_load_kv(self, metadata)",
            f"{_WORKER}.get_transfer_results(self)",
            f"{_WORKER}._read_blocks_for_req(self, req_id, meta)",
            f"{_WORKER}._nixl_handshake(self, host, port, remote_tp_size, expected_engine_id, remote_dcp_size, "
            "remote_pp_size, notif_agents_only)",
            f"{_WORKER}._pop_done_transfers",
            f"{_WORKER}._get_new_notifs(self)",
            f"{_WORKER}._engines_with_inflight_transfers(self)",
            f"{_WORKER}._cleanup_remote_engine(self, engine_id, log_eviction)",
            *(
                f"{_NIXL}.base_worker~self.{name}"
                for name in (
                    "_recving_metadata", "_recving_transfers", "_recv_failures", "_failed_recv_reqs", "_remote_agents",
                    "dst_num_blocks", "compat_hash", "use_host_buffer", "nixl_wrapper",
                )
            ),
            "nixl._api:nixlBind.nixlAgentConfig.pthrDelay",
            "nixl._api:nixlBind.nixlAgentConfig.syncMode",
        ),
        without="KV is neither lent nor borrowed",
    ),
    "candidates beside named tokens": Patch(
        (
            f"{_SAMPLER}.forward(self, logits, sampling_metadata, ...)",
            f"{_SAMPLER}.gather_specific_token_logprobs(self, logprobs, logprob_token_ids, sampled)",
            f"{_SAMPLER}.gather_logprobs(logprobs, num_logprobs, token_ids)",
        ),
        without="a request that names tokens takes the candidates from others of its step",
    ),
    "deadlines of grammars": Patch(
        (
            f"{_GRAMMARS}.__init__(self, vllm_config)",
            f"{_GRAMMARS}._create_grammar(self, request)",
            "vllm.v1.structured_output~self.executor",
        ),
        without="a grammar may take as long as it likes to compile",
    ),
    "preparing requests beside each other": Patch(
        (
            "vllm.renderers.base:BaseRenderer.render_cmpl_async(self, prompts, ...)",
            "vllm.renderers.base:BaseRenderer.validate_token_ids",
            "vllm.renderers.base~self._executor",
            "vllm.v1.engine.async_llm:AsyncLLM.add_request(self, request_id, prompt, params, ...)",
            "vllm.v1.engine.input_processor:InputProcessor._validate_params(self, params, supported_tasks)",
            "vllm.entrypoints.serve.tokenize.api_router:JSONResponse",
        ),
        without="long texts and grammars hold up other requests",
    ),
    "ranks on their slots": Patch(
        (
            "vllm.utils.ompmultiprocessing:OMPProcessManager.configure_omp_envs(self, rank, local_rank)",
            "vllm.utils.ompmultiprocessing~self.cpu_lists",
        ),
        without="the ranks of an engine share its cores",
    ),
    "watching the engine's processes": Patch(
        (
            "vllm.v1.engine.core_client:BackgroundResources.engine_manager",
            "vllm.v1.engine.core_client:BackgroundResources.engine_dead",
            "vllm.v1.engine.core_client~self.outputs_queue",
            "vllm.v1.engine.utils~self.processes",
        ),
        without="a process that dies is noticed when vLLM notices it",
    ),
    "waiting without spinning": Patch(
        (
            f"{_SHM}:SpinCondition"
            "(is_reader, context, notify_address, busy_loop_s)",
            f"{_SHM}:SpinCondition.wait(self, timeout_ms)",
            f"{_SHM}:SpinCondition.record_read(self)",
            f"{_SHM}:SpinCondition.notify(self)",
            f"{_SHM}:SpinCondition.cancel(self)",
            f"{_SHM}:sched_yield",
        ),
        without="processes of an engine wait for each other in vLLM's own way",
    ),
    "one process group for a lone worker": Patch(
        (
            "torch.distributed:init_process_group(backend, world_size, ...)",
            "torch.distributed:new_group(backend, ...)",
            "torch.distributed:destroy_process_group(group)",
            "torch.distributed:group.WORLD",
        ),
        without="an engine has all the process groups that vLLM makes",
    ),
    "leaving memory where it is": Patch(
        (
            "vllm.utils.cpu_resource_utils:get_memory_affinity(pid)",
            "torch:ops._C.init_cpu_memory_env",
        ),
        without="workers bind their memory, on machines with one memory node, too",
    ),
    "compiling nothing": Patch(
        ("torch._dynamo:config.disable",), without="eager engines compile some helpers at their first use"
    ),
    "naming shared memory": Patch(
        ("multiprocessing.shared_memory:_make_filename()",),
        without="what killed engines leave in /dev/shm is not removed",
        of="Python",
    ),
    "uvicorn's ticks": Patch(
        ("uvicorn:Server.main_loop(self)", "uvicorn:Server.on_tick(self, counter)"),
        without="the idle frontend wakes up ten times a second",
        of="uvicorn",
    ),
}  # fmt: skip


def why_not(name: str) -> str | None:
    """What is other than expected, if anything."""
    replacement = REPLACEMENTS[name]
    if replacement.of == "vLLM" and _version() == TESTED:
        return None
    found = (_difference(part) for part in replacement.parts)
    return next((each for each in found if each is not None), None)


def applies(name: str) -> bool:
    """Whether it can be done here. If not, and if it can be gone without, the log says so."""
    why = why_not(name)
    if why is None:
        return True
    replacement = REPLACEMENTS[name]
    whose = f"vLLM {_version()}" if replacement.of == "vLLM" else replacement.of
    told = f"{whose} is not as expected, for {name}: {why}"
    if replacement.without is None:
        raise EngineError(told, f"install vLLM {TESTED}, with which this works")
    _log.warning("%s; %s", told, replacement.without)
    return False


def require(*names: str) -> None:
    """Raises EngineError, in one line, unless all of these can be done here."""
    for name in names:
        applies(name)


def _version() -> str:
    from vllm.version import __version__  # type: ignore[attr-defined]

    version: str = __version__
    return version.partition("+")[0]


def _difference(part: str) -> str | None:
    module, separator, rest = part.partition("~" if "~" in part else ":")
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        return f"{module} cannot be imported ({error})"
    if separator == "~":
        return None if rest in Path(imported.__file__ or "").read_text() else f"{module} knows no {rest}"
    name, parenthesis, parameters = rest.partition("(")
    try:
        found = _resolve(imported, name)
    except AttributeError:
        return f"{module} has no {name}"
    wanted = [each for each in parameters.removesuffix(")").split(", ") if each]
    return _other_parameters(f"{module}.{name}", found, wanted) if parenthesis else None


def _resolve(of: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        if not hasattr(of, name) and name in _annotated(of):
            # A field without a default is no attribute of its class.
            return None
        of = getattr(of, name)
    return of


def _annotated(of: Any) -> set[str]:
    return {name for each in getattr(of, "__mro__", ()) for name in vars(each).get("__annotations__", {})}


def _other_parameters(name: str, function: Any, wanted: list[str]) -> str | None:
    has = list(inspect.signature(function).parameters)
    if wanted[-1:] == ["..."]:
        missing = [each for each in wanted[:-1] if each not in has]
        return f"{name} has no parameter {missing[0]}" if missing else None
    return None if has == wanted else f"{name} takes ({', '.join(has)}), not ({', '.join(wanted)})"
