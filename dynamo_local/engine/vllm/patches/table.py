"""The table of patches: what is replaced in vLLM and other libraries, and the check before it is replaced.

What is only used of vLLM stands in no row: the exact pin and the contract tests hold it. The pinned vLLM is not looked
at either. In any other version, and in other libraries, what a row replaces is compared before it is replaced; a
difference is logged in one line, and the patch is either left out or the process refuses to start.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dynamo_local.core.errors import EngineError

TESTED: Final = "0.32.0"
"""Version of vLLM that pyproject.toml installs."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patch:
    """Row of the table."""

    why: str
    test: str
    """The contract test that fails when the foreign code behaves otherwise: a pytest id, from the repository's root."""
    replaces: tuple[str, ...] = ()
    """Foreign code: `module:name`, which has to exist; `module:name(a, b)`, a function with exactly these parameters;
    `module:name(a, b, ...)`, a function with these among others."""
    without: str | None = None
    """Consequence if the patch cannot be applied. None: the process refuses to start."""
    of: str = "vLLM"
    """Owner of the code."""
    is_deep: bool = False
    """Whether it reaches so deep into vLLM that it is done with the tested version alone."""


_CONTRACT = "tests/e2e/contract"
_OUTPUTS = "vllm.v1.engine.output_processor:OutputProcessor"
_ADD_REQUEST = f"{_OUTPUTS}.add_request(self, request, prompt, parent_req, request_index, queue)"
_PROCESS_OUTPUTS = f"{_OUTPUTS}.process_outputs(self, engine_core_outputs, ...)"
_SAMPLER = "vllm.v1.sample.sampler:Sampler"
_GRAMMARS = "vllm.v1.structured_output:StructuredOutputManager"
_POOL = "vllm.v1.core.block_pool"
_SHM = "vllm.distributed.device_communicators.shm_broadcast"
_NO_KV = "the engine transfers no KV"
_HTTP = "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol"

PATCHES: Final[Mapping[str, Patch]] = {
    # The frontend.
    "the frontend's engine": Patch(
        why="AsyncLLM takes its engine-core client from this method, and offers no way to pass one in",
        test=f"{_CONTRACT}/test_vllm.py::test_failures_reach_the_request_they_belong_to_and_no_other",
        replaces=("vllm.v1.engine.core_client:EngineCoreClient.make_async_mp_client",),
    ),
    "failures of single requests": Patch(
        why="vLLM's output loop ends at the first exception, and fails every request there is",
        test=f"{_CONTRACT}/test_vllm.py::test_failures_reach_the_request_they_belong_to_and_no_other",
        replaces=(_PROCESS_OUTPUTS,),
    ),
    "counting of tokens": Patch(
        why="vLLM counts what a request has used in each API anew, and only for answers that are read to their end",
        test=f"{_CONTRACT}/test_applications.py::test_what_answers_tell_of_their_use_is_counted",
        replaces=(_PROCESS_OUTPUTS, _ADD_REQUEST),
    ),
    "prompts of kept answers": Patch(
        why="the prompt of an answer that goes on is rendered anew, and a template that prints the time makes another",
        test=f"{_CONTRACT}/test_kept_answers.py::test_thoughts_and_calls_of_tools_go_on_in_the_middle",
        replaces=(_ADD_REQUEST,),
    ),
    "preparing requests beside each other": Patch(
        why="long texts and grammars hold up all other requests of vLLM's server",
        test=f"{_CONTRACT}/test_responsive.py::test_a_short_prompt_does_not_wait_for_a_long_one",
        replaces=(
            "vllm.renderers.base:BaseRenderer.render_cmpl_async(self, prompts, ...)",
            # Called at another time.
            "vllm.renderers.base:BaseRenderer.validate_token_ids",
            "concurrent.futures:ThreadPoolExecutor.submit",
            "vllm.v1.engine.async_llm:AsyncLLM.add_request(self, request_id, prompt, params, ...)",
            "vllm.v1.engine.input_processor:InputProcessor._validate_params(self, params, supported_tasks)",
            "vllm.entrypoints.serve.tokenize.api_router:JSONResponse",
        ),
        without="long texts and grammars hold up other requests",
        is_deep=True,
    ),
    "metrics of tool parsers": Patch(
        why="calls of tool parsers are counted for the model that was built last",
        test=f"{_CONTRACT}/test_applications.py::test_tool_calls_are_counted_for_the_model_that_answers",
        replaces=(
            "vllm.parser.metrics:init_parser_metrics(model_name)",
            "vllm.parser.metrics:_model_name",
            "vllm.parser.metrics:_tool_call_parser_invocations",
        ),
        without="calls of tool parsers are counted for the model that was built last",
    ),
    "metrics of HTTP": Patch(
        why="of several applications in one process, the first alone counts its HTTP requests",
        test=f"{_CONTRACT}/test_applications.py::test_each_model_has_its_metrics_whichever_comes_and_goes",
        replaces=("prometheus_fastapi_instrumentator.metrics:default(registry, ...)",),
        without="HTTP requests are counted for one of the models alone",
        of="prometheus-fastapi-instrumentator",
    ),
    "HTTP connections": Patch(
        why="uvicorn bounds neither the number of connections nor the time and size of a request's head, and of "
        "several processes on one socket one accepts most",
        test="tests/unit/vllm/frontend/test_http_connections.py::test_a_head_that_does_not_come_ends_the_connection",
        replaces=(
            f"{_HTTP}.connection_made(self, transport)",
            f"{_HTTP}.connection_lost(self, exc)",
            f"{_HTTP}.data_received(self, data)",
            f"{_HTTP}.on_message_begin(self)",
            f"{_HTTP}.on_header(self, name, value)",
            f"{_HTTP}.on_headers_complete(self)",
            f"{_HTTP}.on_body(self, body)",
            f"{_HTTP}.on_message_complete(self)",
            f"{_HTTP}.on_response_complete(self)",
            f"{_HTTP}._unsupported_upgrade_warning(self)",
            # Only called, but uvicorn is not pinned.
            f"{_HTTP}._unset_keepalive_if_required(self)",
            f"{_HTTP.partition(':')[0]}:STATUS_LINE",
        ),
        of="uvicorn",
    ),
    "uvicorn's ticks": Patch(
        why="uvicorn wakes up ten times a second to see whether it is to end",
        test="tests/unit/vllm/patches/test_http_ticks.py::test_a_server_answers_with_the_time_and_ends_when_told_to",
        # The second is only called, but uvicorn is not pinned.
        replaces=("uvicorn:Server.main_loop(self)", "uvicorn:Server.on_tick(self, counter)"),
        without="the idle frontend wakes up ten times a second",
        of="uvicorn",
    ),
    # Requests in the engine core and its workers.
    "continuing requests": Patch(
        why="a request that goes on from another engine has output already, which vLLM cannot be told",
        test=f"{_CONTRACT}/test_continuing.py::test_the_scheduler_has_it_as_one_that_it_resumes",
        replaces=(
            "vllm.v1.request:Request.from_engine_core_request(request, block_hasher)",
            "vllm.v1.request:Request.take_prefill_stats(self)",
            f"{_GRAMMARS}._create_grammar(self, request)",
            f"{_GRAMMARS}.accept_tokens(self, request, new_token_ids)",
            "vllm.v1.worker.gpu_input_batch:CachedRequestState.__post_init__(self)",
        ),
    ),
    "candidates beside named tokens": Patch(
        why="a request that names tokens takes the candidates from the others of its step",
        test=f"{_CONTRACT}/test_logprobs.py::test_each_request_is_told_what_it_asked_for",
        replaces=(
            f"{_SAMPLER}.forward(self, logits, sampling_metadata, ...)",
            f"{_SAMPLER}.gather_specific_token_logprobs(self, logprobs, logprob_token_ids, sampled)",
        ),
        without="a request that names tokens takes the candidates from others of its step",
    ),
    "turns of waiting requests": Patch(
        why="vLLM's queue knows priorities alone: background work waits for ever, and a key behind all of another",
        test=f"{_CONTRACT}/test_fair_waiting.py::test_a_scheduler_lets_classes_and_keys_take_turns",
        replaces=("vllm.v1.core.sched.scheduler:Scheduler.__init__(self, vllm_config, ...)",),
        without="within the engine's queue the highest class goes first, and whoever came first",
        is_deep=True,
    ),
    "room for urgent requests": Patch(
        why="vLLM preempts for KV blocks alone: where all slots are taken an urgent request waits for one to end",
        test=f"{_CONTRACT}/test_make_room.py::test_an_urgent_request_takes_the_slot_of_a_less_urgent_one",
        replaces=("vllm.v1.core.sched.scheduler:Scheduler.schedule(self, throttle_prefills)",),
        without="an urgent request waits in an engine all of whose slots are taken",
        is_deep=True,
    ),
    "adapters that fit nothing": Patch(
        why="an adapter of which no tensor is for a module of the model is loaded, and the model alone answers",
        test="tests/e2e/models/test_listed_adapters.py::test_adapters_come_and_go_while_the_engine_runs",
        replaces=("vllm.lora.model_manager:LoRAModelManager._create_merged_loras_inplace(self, lora_model)",),
        without="an adapter that was trained for a model of other names is answered by the model alone",
        is_deep=True,
    ),
    "deadlines of grammars": Patch(
        why="a grammar may take minutes to compile, and cannot be cancelled",
        test=f"{_CONTRACT}/test_responsive.py::test_an_engine_gives_up_a_grammar_that_takes_too_long",
        replaces=(f"{_GRAMMARS}.__init__(self, vllm_config)", f"{_GRAMMARS}._create_grammar(self, request)"),
        without="a grammar may take as long as it likes to compile",
        is_deep=True,
    ),
    # KV blocks, and the engine core's methods.
    "KV transfer": Patch(
        why="engines read each other's cached blocks; vLLM's own connector reads blocks of requests known to both",
        test=f"{_CONTRACT}/test_pull.py::test_exactly_these_methods_are_overridden_with_the_same_parameters",
        without=_NO_KV,
        is_deep=True,
    ),
    "KV agents": Patch(
        why="on a CPU, engines copy from each other's memory without a port, where NIXL would listen on one",
        test=f"{_CONTRACT}/test_agents.py::test_agents_are_replaced_for_a_while_only",
        replaces=("vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker:NixlWrapper",),
        without=_NO_KV,
        is_deep=True,
    ),
    "references to KV blocks": Patch(
        why="the blocks kept by nothing but leases are counted with every step",
        test=f"{_CONTRACT}/test_pull.py::test_references_of_all_kinds_are_told_of_as_vllm_takes_and_gives_them_up",
        replaces=(f"{_POOL}:BlockPool.touch(self, blocks)", f"{_POOL}:BlockPool.free_blocks(self, ordered_blocks)"),
        without=_NO_KV,
        is_deep=True,
    ),
    "parking": Patch(
        why="vLLM gives no memory back on a CPU, and sleeps without asking who reads its KV",
        test=f"{_CONTRACT}/test_parking.py::test_what_parking_calls_is_there",
        without="workers are not parked",
        is_deep=True,
    ),
    "changes of the prefix cache": Patch(
        why="routers are to know which blocks are cached; vLLM's own events need a socket, and tell what prompts say",
        test=f"{_CONTRACT}/test_cache_changes.py::test_what_is_told_is_what_the_pool_has_cached",
        replaces=(
            f"{_POOL}:BlockHashToBlockMap.insert(self, key, block)",
            f"{_POOL}:BlockHashToBlockMap.pop(self, key, block_id)",
            f"{_POOL}:BlockPool.reset_prefix_cache(self)",
            "vllm.v1.core.sched.scheduler:Scheduler.update_from_output(self, scheduler_output, model_runner_output)",
        ),
        without="routers guess which blocks this engine has cached",
        is_deep=True,
    ),
    # The engine's processes, and what forks inherit.
    "watching the engine's processes": Patch(
        why="vLLM notices the death of one of several ranks after up to 9 s",
        test="tests/e2e/faults/test_engine_death.py::test_streams_go_on_when_a_process_of_an_engine_is_killed",
        without="a process that dies is noticed when vLLM notices it",
        is_deep=True,
    ),
    "frozen garbage collection": Patch(
        why="an engine's processes take seconds to end, and copy the memory that they share with others",
        test="tests/unit/vllm/test_plugin.py::test_what_an_engine_has_frozen_stays_so_in_processes_of_ours_alone",
        replaces=("gc:unfreeze()",),
        without="processes of an engine take seconds to end",
        of="Python",
    ),
    "plugins that forks inherit": Patch(
        why="each process of an engine reads a file of every installed package, for 20 ms",
        test="tests/unit/vllm/test_plugin.py::test_plugins_are_looked_for_once",
        replaces=("importlib.metadata:entry_points(params)",),
        without="each process of an engine looks for plugins",
        of="Python",
    ),
    "GPUs that forks inherit": Patch(
        why="NVML keeps the driver's files open in the process that asks it, and what is forked from there has them",
        test=f"{_CONTRACT}/test_start.py::test_nvml_is_asked_once_and_in_a_process_that_ends",
        replaces=("torch.cuda:_raw_device_count_nvml()", "torch.cuda:_raw_device_uuid_nvml()"),
        without="services on GPUs are not forked, and each imports vLLM by itself",
        of="torch",
    ),
    "naming shared memory": Patch(
        why="what killed engines leave in /dev/shm is removed by its name",
        test="tests/unit/vllm/test_plugin.py::test_shared_memory_of_processes_of_ours_alone_is_named_by_whose_it_is",
        replaces=("multiprocessing.shared_memory:_make_filename()",),
        without="what killed engines leave in /dev/shm is not removed",
        of="Python",
    ),
    "weights that forks share": Patch(
        why="each worker loads the weights that others of the same model have loaded",
        test="tests/e2e/models/test_prepared.py::test_answers_are_those_of_a_worker_that_has_loaded_the_weights",
        replaces=("vllm.v1.worker.cpu_model_runner:get_model(vllm_config, ...)", "torch.distributed:new_group"),
        without="each worker loads the weights of its model",
        is_deep=True,
    ),
    "kernels that forks inherit": Patch(
        why="each worker looks for kernels in all modules, for 0.2 s",
        test=f"{_CONTRACT}/test_start.py::test_kernels_are_replaced_once_and_in_modules_that_come_later",
        replaces=("vllm.platforms:current_platform.register_triton_kernel_overrides()",),
        without="each worker replaces the kernels itself",
    ),
    "cores that forks inherit": Patch(
        why="each worker runs a shell and lscpu for the list of cores",
        test=f"{_CONTRACT}/test_start.py::test_cores_are_listed_once",
        replaces=("vllm.utils.cpu_resource_utils:_get_cpu_list()",),
        without="each worker runs lscpu",
    ),
    "models that are looked at here": Patch(
        why="each process that configures an engine imports vLLM once more at the first start of a kind of model",
        test=f"{_CONTRACT}/test_start.py::test_a_model_is_looked_at_in_this_process",
        replaces=("vllm.model_executor.models.registry:_run_in_subprocess(fn)",),
        without="the first start of a kind of model takes longer",
    ),
    "logging that forks inherit": Patch(
        why="each process of an engine configures the same logging again",
        test=f"{_CONTRACT}/test_start.py::test_logging_is_configured_where_it_differs",
        replaces=(
            "vllm.v1.engine.core:configure_logging(config)",
            "vllm.v1.executor.multiproc_executor:configure_logging(config)",
        ),
        without="each process of an engine configures its logging",
    ),
    # Machines with few cores.
    "waiting without spinning": Patch(
        why="processes of an engine poll for each other, on the cores that compute what is waited for",
        test=f"{_CONTRACT}/test_vllm.py::test_processes_are_woken_up_by_what_comes",
        replaces=(
            f"{_SHM}:SpinCondition(is_reader, context, notify_address, busy_loop_s)",
            f"{_SHM}:SpinCondition.wait(self, timeout_ms)",
            f"{_SHM}:SpinCondition.record_read(self)",
            f"{_SHM}:SpinCondition.notify(self)",
            f"{_SHM}:SpinCondition.cancel(self)",
            f"{_SHM}:sched_yield",
        ),
        without="processes of an engine wait for each other in vLLM's own way",
    ),
    "one process group for a lone worker": Patch(
        why="each of a dozen process groups has a thread that wakes up a hundred times a second",
        test="tests/e2e/models/test_lone_process_group.py::test_a_lone_process_has_one_group_without_a_thread",
        replaces=(
            "torch.distributed:init_process_group(backend, world_size, ...)",
            "torch.distributed:new_group(backend, ...)",
            "torch.distributed:destroy_process_group(group)",
        ),
        without="an engine has all the process groups that vLLM makes",
    ),
    "leaving memory where it is": Patch(
        why="binding memory waits for every core of the machine, for minutes where engines decode",
        test=f"{_CONTRACT}/test_vllm.py::test_workers_bind_memory_where_there_is_a_choice",
        replaces=("torch:ops._C.init_cpu_memory_env",),
        without="workers bind their memory, on machines with one memory node, too",
    ),
    "KV memory zeroed at first use": Patch(
        why="engines write zeros over their whole KV cache when they start, for a second and more",
        test=f"{_CONTRACT}/test_start.py::test_a_kv_cache_is_zero_and_takes_no_memory_until_it_is_used",
        replaces=("vllm.v1.worker.utils:torch",),
        without="engines touch all of their KV cache when they start",
    ),
    "compiling nothing": Patch(
        why="eager engines compile some helpers at their first use, for ten seconds and more",
        test=f"{_CONTRACT}/test_vllm.py::test_what_vllm_marks_to_be_compiled_runs_as_it_is",
        replaces=("torch._dynamo:config.disable",),
        without="eager engines compile some helpers at their first use",
    ),
    "ranks on their slots": Patch(
        why="OpenMP of a forked worker has read its cores before the fork",
        test=f"{_CONTRACT}/test_ranks.py::test_a_rank_begins_on_the_cores_of_its_slot",
        replaces=("vllm.utils.ompmultiprocessing:OMPProcessManager.configure_omp_envs(self, rank, local_rank)",),
        without="the ranks of an engine share its cores",
        is_deep=True,
    ),
    "NIXL's progress threads": Patch(
        why="NIXL's Python package makes each agent's thread poll without a pause",
        test=f"{_CONTRACT}/test_pull.py::test_nixl_takes_what_makes_its_threads_sleep",
        replaces=("nixl._api:nixlBind.nixlAgentConfig.pthrDelay", "nixl._api:nixlBind.nixlAgentConfig.syncMode"),
        without="each engine keeps a core busy for as long as it lives",
        of="NIXL",
    ),
}
"""Patches by the names that log lines and errors give."""


def why_not(name: str) -> str | None:
    """Say what keeps this patch from being applied here: what it replaces is another thing; None if nothing does."""
    patch = PATCHES[name]
    if patch.of == "vLLM" and _version() == TESTED:
        return None
    if patch.is_deep:
        return f"this is done with vLLM {TESTED} alone"
    found = map(_difference, patch.replaces)
    return next((each for each in found if each is not None), None)


def applies(name: str) -> bool:
    """Whether the patch can be applied here. If not, the log says why and what happens without.

    Raises EngineError for a patch that cannot be left out.
    """
    why = why_not(name)
    if why is None:
        return True
    patch = PATCHES[name]
    whose = f"vLLM {_version()}" if patch.of == "vLLM" else patch.of
    difference = f"{whose} is not as expected, for {name}: {why}"
    if patch.without is None:
        raise EngineError(difference, f"install vLLM {TESTED}, with which this works")
    _log.warning("%s; %s", difference, patch.without)
    return False


def require(*names: str) -> None:
    """Raise EngineError, in one line, unless all of these patches can be applied here."""
    for name in names:
        applies(name)


def _version() -> str:
    from vllm.version import __version__  # type: ignore[attr-defined]

    version: str = __version__
    return version.partition("+")[0]


def _difference(part: str) -> str | None:
    module, _, rest = part.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        return f"{module} cannot be imported ({error})"
    dotted, parenthesis, parameters = rest.partition("(")
    for name in dotted.split("."):
        if not hasattr(found, name):
            return f"{module} has no {dotted}"
        found = getattr(found, name)
    wanted = [each for each in parameters.removesuffix(")").split(", ") if each]
    return _other_parameters(f"{module}.{dotted}", found, wanted) if parenthesis else None


def _other_parameters(name: str, function: object, wanted: list[str]) -> str | None:
    try:
        has = list(inspect.signature(function).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return f"{name} is no function whose parameters are known"
    if wanted[-1:] == ["..."]:
        missing = [each for each in wanted[:-1] if each not in has]
        return f"{name} has no parameter {missing[0]}" if missing else None
    return None if has == wanted else f"{name} takes ({', '.join(has)}), not ({', '.join(wanted)})"
