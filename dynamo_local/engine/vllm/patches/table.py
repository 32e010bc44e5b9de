"""The table of patches: what is replaced in vLLM and other libraries, with what these replacements rely on.

What is only used of vLLM stands in no row: the exact pin and the contract tests hold it. A part of foreign code is
written `module:name`, which has to exist; `module:name(a, b)`, a function with exactly these parameters;
`module:name(a, b, ...)`, a function with these among others; or `module~text`, a module whose source has this text.
check.py compares them before a patch is applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Patch:
    """Row of the table. A row without parts replaces nothing, and reaches so deep into vLLM that it is done with the
    tested version alone."""

    file: str
    """Path of the module that replaces the code, from engine/vllm on."""
    why: str
    test: str
    """The contract test that fails when the foreign code behaves otherwise: a pytest id, from the repository's root."""
    replaces: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    without: str | None = None
    """Consequence if the patch cannot be applied. None: the process refuses to start."""
    of: str = "vLLM"
    """Owner of the code."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Foreign code that has to be as expected."""
        return self.replaces + self.uses


_CONTRACT = "tests/e2e/contract"
_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
_CLIENT = "vllm.v1.engine.core_client:EngineCoreClient"
_SAMPLER = "vllm.v1.sample.sampler:Sampler"
_GRAMMARS = "vllm.v1.structured_output:StructuredOutputManager"
_SHM = "vllm.distributed.device_communicators.shm_broadcast"
_REGISTRY = "vllm.model_executor.models.registry"
_HTTP = "uvicorn.protocols.http.httptools_impl"

_NO_KV = "the engine transfers no KV"

_FRONTEND: Mapping[str, Patch] = {
    "the frontend's engine": Patch(
        file="patches/frontend.py",
        why="AsyncLLM takes its engine-core client from this method, and offers no way to pass one in",
        test=f"{_CONTRACT}/test_vllm.py::test_failures_reach_the_request_they_belong_to_and_no_other",
        replaces=(f"{_CLIENT}.make_async_mp_client",),
        uses=("vllm.v1.engine.async_llm:AsyncLLM.from_vllm_config(vllm_config, disable_log_stats, ...)",),
    ),
    "failures of single requests": Patch(
        file="patches/frontend.py",
        why="vLLM's output loop ends at the first exception, and fails every request there is",
        test=f"{_CONTRACT}/test_vllm.py::test_failures_reach_the_request_they_belong_to_and_no_other",
        replaces=("vllm.v1.engine.output_processor:OutputProcessor.process_outputs(self, engine_core_outputs, ...)",),
        uses=(
            "vllm.v1.engine.output_processor:OutputProcessor.abort_requests(self, request_ids, internal)",
            "vllm.v1.engine.output_processor~self.request_states",
        ),
    ),
    "counting of tokens": Patch(
        file="patches/frontend.py",
        why="vLLM counts what a request has used in each API anew, and only for answers that are read to their end",
        test=f"{_CONTRACT}/test_applications.py::test_what_answers_tell_of_their_use_is_counted",
        replaces=(
            "vllm.v1.engine.output_processor:OutputProcessor.process_outputs(self, engine_core_outputs, ...)",
            "vllm.v1.engine.output_processor:OutputProcessor.add_request"
            "(self, request, prompt, parent_req, request_index, queue)",
        ),
        uses=(
            "vllm.v1.engine.output_processor~self.request_states",
            "vllm.v1.engine.output_processor~del output.new_token_ids[num_kept:]",
            "vllm.v1.engine.output_processor~self.prompt_len",
            "vllm.v1.engine.output_processor~self.num_cached_tokens",
        ),
    ),
    "prompts of kept answers": Patch(
        file="patches/frontend.py",
        why="the prompt of an answer that goes on is rendered anew, and a template that prints the time makes another",
        test=f"{_CONTRACT}/test_kept_answers.py::test_thoughts_and_calls_of_tools_go_on_in_the_middle",
        replaces=(
            "vllm.v1.engine.output_processor:OutputProcessor.add_request"
            "(self, request, prompt, parent_req, request_index, queue)",
        ),
        uses=("vllm.v1.engine.output_processor~self.tokenizer", "vllm.v1.engine:EngineCoreRequest.prompt_token_ids"),
    ),
    "preparing requests beside each other": Patch(
        file="patches/frontend.py",
        why="long texts and grammars hold up all other requests of vLLM's server",
        test=f"{_CONTRACT}/test_responsive.py::test_a_short_prompt_does_not_wait_for_a_long_one",
        replaces=(
            "vllm.renderers.base:BaseRenderer.render_cmpl_async(self, prompts, ...)",
            "vllm.renderers.base~self._executor",
            "vllm.renderers.base~self._resources",
            "vllm.v1.engine.async_llm:AsyncLLM.add_request(self, request_id, prompt, params, ...)",
            "vllm.v1.engine.input_processor:InputProcessor._validate_params(self, params, supported_tasks)",
            "vllm.entrypoints.serve.tokenize.api_router:JSONResponse",
        ),
        uses=("vllm.renderers.base:BaseRenderer.validate_token_ids",),
        without="long texts and grammars hold up other requests",
    ),
    "metrics of tool parsers": Patch(
        file="patches/metrics.py",
        why="calls of tool parsers are counted for the model that was built last",
        test=f"{_CONTRACT}/test_applications.py::test_tool_calls_are_counted_for_the_model_that_answers",
        replaces=(
            "vllm.parser.metrics:init_parser_metrics(model_name)",
            "vllm.parser.metrics:_model_name",
            "vllm.parser.metrics:_tool_call_parser_invocations",
        ),
        uses=(
            "vllm.parser.metrics:_TOOL_CALL_PARSER_INVOCATIONS_TOTAL",
            "vllm.parser.metrics:ToolCallOutcome",
            "vllm.parser.metrics:RequestType",
        ),
        without="calls of tool parsers are counted for the model that was built last",
    ),
    "metrics of HTTP": Patch(
        file="patches/metrics.py",
        why="of several applications in one process, the first alone counts its HTTP requests",
        test=f"{_CONTRACT}/test_applications.py::test_each_model_has_its_metrics_whichever_comes_and_goes",
        uses=(
            "prometheus_fastapi_instrumentator.metrics:default(registry, ...)",
            "prometheus_fastapi_instrumentator.middleware:PrometheusInstrumentatorMiddleware",
        ),
        without="HTTP requests are counted for one of the models alone",
        of="prometheus-fastapi-instrumentator",
    ),
    "HTTP connections": Patch(
        file="frontend/http_connections.py",
        why="uvicorn bounds neither the number of connections nor the time and size of a request's head, and of "
        "several processes on one socket one accepts most",
        test="tests/unit/vllm/frontend/test_http_connections.py::test_a_head_that_does_not_come_ends_the_connection",
        uses=(
            f"{_HTTP}:HttpToolsProtocol.connection_made(self, transport)",
            f"{_HTTP}:HttpToolsProtocol.connection_lost(self, exc)",
            f"{_HTTP}:HttpToolsProtocol.data_received(self, data)",
            f"{_HTTP}:HttpToolsProtocol.on_message_begin(self)",
            f"{_HTTP}:HttpToolsProtocol.on_header(self, name, value)",
            f"{_HTTP}:HttpToolsProtocol.on_headers_complete(self)",
            f"{_HTTP}:HttpToolsProtocol.on_body(self, body)",
            f"{_HTTP}:HttpToolsProtocol.on_message_complete(self)",
            f"{_HTTP}:HttpToolsProtocol.on_response_complete(self)",
            f"{_HTTP}:HttpToolsProtocol._unset_keepalive_if_required(self)",
            f"{_HTTP}:HttpToolsProtocol._unsupported_upgrade_warning(self)",
            f"{_HTTP}:STATUS_LINE",
            "uvicorn.server~self.servers",
            "uvicorn.server~server_state=self.server_state",
            "uvicorn.server~app_state=self.lifespan.state",
            "uvicorn.server~for sock in sockets:",
        ),
        of="uvicorn",
    ),
    "uvicorn's ticks": Patch(
        file="patches/http_ticks.py",
        why="uvicorn wakes up ten times a second to see whether it is to end",
        test="tests/unit/vllm/patches/test_http_ticks.py::test_a_server_answers_with_the_time_and_ends_when_told_to",
        replaces=("uvicorn:Server.main_loop(self)",),
        uses=("uvicorn:Server.on_tick(self, counter)",),
        without="the idle frontend wakes up ten times a second",
        of="uvicorn",
    ),
}

_REQUESTS: Mapping[str, Patch] = {
    "continuing requests": Patch(
        file="patches/requests.py",
        why="a request that goes on from another engine has output already, which vLLM cannot be told",
        test=f"{_CONTRACT}/test_continuing.py::test_the_scheduler_has_it_as_one_that_it_resumes",
        replaces=(
            "vllm.v1.request:Request.from_engine_core_request(request, block_hasher)",
            "vllm.v1.request:Request.take_prefill_stats(self)",
            f"{_GRAMMARS}._create_grammar(self, request)",
            f"{_GRAMMARS}.accept_tokens(self, request, new_token_ids)",
            "vllm.v1.worker.gpu_input_batch:CachedRequestState.__post_init__(self)",
        ),
        uses=(
            "vllm.v1.request:Request.append_output_token_ids(self, token_ids)",
            "vllm.v1.structured_output.request:StructuredOutputRequest.reasoning_ended",
            "vllm.v1.worker.gpu_input_batch:CachedRequestState.generator",
            "vllm.config:VllmConfig.use_v2_model_runner",
            "vllm.config:ModelConfig.use_fp64_gumbel",
        ),
    ),
    "candidates beside named tokens": Patch(
        file="patches/requests.py",
        why="a request that names tokens takes the candidates from the others of its step",
        test=f"{_CONTRACT}/test_logprobs.py::test_each_request_is_told_what_it_asked_for",
        replaces=(
            f"{_SAMPLER}.forward(self, logits, sampling_metadata, ...)",
            f"{_SAMPLER}.gather_specific_token_logprobs(self, logprobs, logprob_token_ids, sampled)",
        ),
        uses=(f"{_SAMPLER}.gather_logprobs(logprobs, num_logprobs, token_ids)",),
        without="a request that names tokens takes the candidates from others of its step",
    ),
    "turns of waiting requests": Patch(
        file="patches/scheduler.py",
        why="vLLM's queue knows priorities alone: background work waits for ever, and a key behind all of another",
        test=f"{_CONTRACT}/test_fair_waiting.py::test_a_scheduler_lets_classes_and_keys_take_turns",
        replaces=("vllm.v1.core.sched.scheduler:Scheduler.__init__(self, vllm_config, ...)",),
        uses=(
            "vllm.v1.core.sched.scheduler~self.waiting = create_request_queue(self.policy)",
            "vllm.v1.core.sched.scheduler~self.waiting.prepend_requests(step_skipped_waiting)",
            "vllm.v1.core.sched.scheduler~step_skipped_waiting.appendleft(request_to_skip)",
            "vllm.v1.core.sched.request_queue:PriorityRequestQueue",
            "vllm.v1.core.sched.request_queue:RequestQueue.remove_requests(self, requests)",
            "vllm.v1.request:Request.num_tokens",
            "vllm.v1.request:Request.is_finished(self)",
        ),
        without="within the engine's queue the highest class goes first, and whoever came first",
    ),
    "room for urgent requests": Patch(
        file="patches/scheduler.py",
        why="vLLM preempts for KV blocks alone: where all slots are taken an urgent request waits for one to end",
        test=f"{_CONTRACT}/test_make_room.py::test_an_urgent_request_takes_the_slot_of_a_less_urgent_one",
        replaces=("vllm.v1.core.sched.scheduler:Scheduler.schedule(self, throttle_prefills)",),
        uses=(
            "vllm.v1.core.sched.scheduler:Scheduler._preempt_request(self, request, timestamp, drop_stale_output)",
            "vllm.v1.core.sched.scheduler~self.waiting.prepend_request(request)",
            "vllm.v1.core.sched.scheduler~if num_running >= self.max_num_active_reqs:",
            "vllm.v1.core.sched.scheduler~num_running = len(self.running) + self.num_waiting_for_streaming_input",
            "vllm.v1.core.sched.scheduler~drop_stale_output=self.requires_kv_delivery",
            "vllm.v1.core.sched.scheduler~request_queue = self.kv_holding_waiting",
            "vllm.v1.core.sched.scheduler~if request_id not in self.finished_recving_kv_req_ids:",
            "vllm.v1.core.sched.scheduler~if request.num_stale_output_tokens and not request.drop_stale_output:",
            "vllm.v1.core.sched.scheduler~len(scheduled_loras) == self.lora_config.max_loras",
            "vllm.v1.core.sched.scheduler:Scheduler.pause_state",
            "vllm.v1.core.sched.interface:PauseState.UNPAUSED",
            "vllm.v1.structured_output.request:StructuredOutputRequest.grammar",
        ),
        without="an urgent request waits in an engine all of whose slots are taken",
    ),
    "adapters that fit nothing": Patch(
        file="patches/requests.py",
        why="an adapter of which no tensor is for a module of the model is loaded, and the model alone answers",
        test="tests/e2e/models/test_listed_adapters.py::test_adapters_come_and_go_while_the_engine_runs",
        replaces=("vllm.lora.model_manager:LoRAModelManager._create_merged_loras_inplace(self, lora_model)",),
        uses=(
            "vllm.lora.model_manager:LoRAModelManager._get_lora_layer_weights(self, lora_model, module_name)",
            "vllm.lora.model_manager~self.modules[module_name] = module",
            "vllm.lora.lora_model~self.modules_to_save = modules_to_save or {}",
            "vllm.distributed:get_pp_group()",
        ),
        without="an adapter that was trained for a model of other names is answered by the model alone",
    ),
    "deadlines of grammars": Patch(
        file="patches/requests.py",
        why="a grammar may take minutes to compile, and cannot be cancelled",
        test=f"{_CONTRACT}/test_responsive.py::test_an_engine_gives_up_a_grammar_that_takes_too_long",
        replaces=(
            f"{_GRAMMARS}.__init__(self, vllm_config)",
            f"{_GRAMMARS}._create_grammar(self, request)",
            "vllm.v1.structured_output~self.executor",
        ),
        without="a grammar may take as long as it likes to compile",
    ),
}

_PARKING: Mapping[str, Patch] = {
    "parking": Patch(
        file="parking.py",
        why="vLLM gives no memory back on a CPU, and sleeps without asking who reads its KV",
        test=f"{_CONTRACT}/test_parking.py::test_what_parking_calls_is_there",
        without="workers are not parked",
    ),
}

_KV: Mapping[str, Patch] = {
    "KV transfer": Patch(
        file="kv/pull/connector.py",
        why="engines read each other's cached blocks; vLLM's own connector reads blocks of requests known to both",
        test=f"{_CONTRACT}/test_pull.py::test_exactly_these_methods_are_overridden_with_the_same_parameters",
        without=_NO_KV,
    ),
    "KV agents": Patch(
        file="patches/kv.py",
        why="on a CPU, engines copy from each other's memory without a port, where NIXL would listen on one",
        test=f"{_CONTRACT}/test_agents.py::test_agents_are_replaced_for_a_while_only",
        replaces=(f"{_NIXL}.base_worker:NixlWrapper",),
        without=_NO_KV,
    ),
    "references to KV blocks": Patch(
        file="patches/kv.py",
        why="the blocks kept by nothing but leases are counted with every step",
        test=f"{_CONTRACT}/test_pull.py::test_references_of_all_kinds_are_told_of_as_vllm_takes_and_gives_them_up",
        replaces=(
            "vllm.v1.core.block_pool:BlockPool.touch(self, blocks)",
            "vllm.v1.core.block_pool:BlockPool.free_blocks(self, ordered_blocks)",
        ),
        without=_NO_KV,
    ),
    "utility methods of the engine core": Patch(
        file="patches/kv.py",
        why="the block pool may only be touched between two steps, by the engine core's own loop",
        test=f"{_CONTRACT}/test_pull.py::test_a_utility_method_may_answer_later",
        without=_NO_KV,
    ),
}

_ROUTING: Mapping[str, Patch] = {
    "changes of the prefix cache": Patch(
        file="patches/kv.py",
        why="routers are to know which blocks are cached; vLLM's own events need a socket, and tell what prompts say",
        test=f"{_CONTRACT}/test_cache_changes.py::test_what_is_told_is_what_the_pool_has_cached",
        replaces=(
            "vllm.v1.core.block_pool:BlockHashToBlockMap.insert(self, key, block)",
            "vllm.v1.core.block_pool:BlockHashToBlockMap.pop(self, key, block_id)",
            "vllm.v1.core.block_pool:BlockPool.reset_prefix_cache(self)",
            "vllm.v1.core.sched.scheduler:Scheduler.update_from_output(self, scheduler_output, model_runner_output)",
        ),
        uses=(
            "vllm.v1.core.block_pool~self.cached_block_hash_to_block = BlockHashToBlockMap()",
            "vllm.v1.core.block_pool~self._cache: dict[",
            "vllm.v1.core.block_pool~self.hash_block_size",
            "vllm.v1.core.kv_cache_manager~self.block_pool = self.coordinator.block_pool",
            "vllm.v1.core.kv_cache_coordinator~self.single_type_managers",
            "vllm.v1.core.kv_cache_utils:get_group_id(key)",
            "vllm.v1.kv_cache_interface:is_full_attention_spec(kv_cache_spec)",
            "vllm.v1.engine.core~self.output_queue",
            "vllm.v1.engine:EngineCoreOutputs.scheduler_stats",
            "vllm.v1.metrics.stats:SchedulerStats.ec_connector_stats",
        ),
        without="routers guess which blocks this engine has cached",
    ),
}

_PROCESSES: Mapping[str, Patch] = {
    "watching the engine's processes": Patch(
        file="processes.py",
        why="vLLM notices the death of one of several ranks after up to 9 s",
        test="tests/e2e/faults/test_engine_death.py::test_streams_go_on_when_a_process_of_an_engine_is_killed",
        without="a process that dies is noticed when vLLM notices it",
    ),
    "frozen garbage collection": Patch(
        file="patches/forks.py",
        why="an engine's processes take seconds to end, and copy the memory that they share with others",
        test="tests/unit/vllm/test_plugin.py::test_what_an_engine_has_frozen_stays_so_in_processes_of_ours_alone",
        replaces=("gc:unfreeze()",),
        without="processes of an engine take seconds to end",
        of="Python",
    ),
    "plugins that forks inherit": Patch(
        file="patches/forks.py",
        why="each process of an engine reads a file of every installed package, for 20 ms",
        test="tests/unit/vllm/test_plugin.py::test_plugins_are_looked_for_once",
        replaces=("importlib.metadata:entry_points(params)",),
        without="each process of an engine looks for plugins",
        of="Python",
    ),
    "GPUs that forks inherit": Patch(
        file="patches/forks.py",
        why="NVML keeps the driver's files open in the process that asks it, and what is forked from there has them",
        test=f"{_CONTRACT}/test_start.py::test_nvml_is_asked_once_and_in_a_process_that_ends",
        replaces=("torch.cuda:_raw_device_count_nvml()", "torch.cuda:_raw_device_uuid_nvml()"),
        without="services on GPUs are not forked, and each imports vLLM by itself",
        of="torch",
    ),
    "naming shared memory": Patch(
        file="patches/forks.py",
        why="what killed engines leave in /dev/shm is removed by its name",
        test="tests/unit/vllm/test_plugin.py::test_shared_memory_of_processes_of_ours_alone_is_named_by_whose_it_is",
        replaces=("multiprocessing.shared_memory:_make_filename()",),
        without="what killed engines leave in /dev/shm is not removed",
        of="Python",
    ),
}

_TUNING: Mapping[str, Patch] = {
    "weights that forks share": Patch(
        file="patches/loaded_model.py",
        why="each worker loads the weights that others of the same model have loaded",
        test="tests/e2e/models/test_prepared.py::test_answers_are_those_of_a_worker_that_has_loaded_the_weights",
        replaces=("vllm.v1.worker.cpu_model_runner:get_model(vllm_config, ...)",),
        uses=(
            "vllm.v1.worker.cpu_model_runner:_set_torch_accelerator_to_noop()",
            "vllm.v1.worker.cpu_model_runner~self.model = get_model(vllm_config=self.vllm_config)",
            "vllm.config:CompilationConfig.static_forward_context",
            "vllm.config:CompilationConfig.static_all_moe_layers",
            "vllm.config:VllmConfig.use_v2_model_runner",
        ),
        without="each worker loads the weights of its model",
    ),
    "kernels that forks inherit": Patch(
        file="patches/forks.py",
        why="each worker looks for kernels in all modules, for 0.2 s",
        test=f"{_CONTRACT}/test_start.py::test_kernels_are_replaced_once_and_in_modules_that_come_later",
        replaces=("vllm.platforms:current_platform.register_triton_kernel_overrides()",),
        uses=("vllm.triton_utils.dispatcher:register_kernels(overrides)",),
        without="each worker replaces the kernels itself",
    ),
    "cores that forks inherit": Patch(
        file="patches/forks.py",
        why="each worker runs a shell and lscpu for the list of cores",
        test=f"{_CONTRACT}/test_start.py::test_cores_are_listed_once",
        replaces=("vllm.utils.cpu_resource_utils:_get_cpu_list()",),
        uses=("vllm.utils.cpu_resource_utils:get_allowed_cpu_list()",),
        without="each worker runs lscpu",
    ),
    "models that are looked at here": Patch(
        file="patches/forks.py",
        why="each process that configures an engine imports vLLM once more at the first start of a kind of model",
        test=f"{_CONTRACT}/test_start.py::test_a_model_is_looked_at_in_this_process",
        replaces=(f"{_REGISTRY}:_run_in_subprocess(fn)",),
        uses=(f"{_REGISTRY}:_LazyRegisteredModel.inspect_model_cls(self)",),
        without="the first start of a kind of model takes longer",
    ),
    "logging that forks inherit": Patch(
        file="patches/forks.py",
        why="each process of an engine configures the same logging again",
        test=f"{_CONTRACT}/test_start.py::test_logging_is_configured_where_it_differs",
        replaces=(
            "vllm.v1.engine.core:configure_logging(config)",
            "vllm.v1.executor.multiproc_executor:configure_logging(config)",
        ),
        uses=("vllm.logger:configure_logging_if_needed(config)",),
        without="each process of an engine configures its logging",
    ),
    "waiting without spinning": Patch(
        file="patches/tuning.py",
        why="processes of an engine poll for each other, on the cores that compute what is waited for",
        test=f"{_CONTRACT}/test_vllm.py::test_processes_are_woken_up_by_what_comes",
        replaces=(
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
        file="patches/tuning.py",
        why="each of a dozen process groups has a thread that wakes up a hundred times a second",
        test="tests/e2e/models/test_lone_process_group.py::test_a_lone_process_has_one_group_without_a_thread",
        replaces=(
            "torch.distributed:init_process_group(backend, world_size, ...)",
            "torch.distributed:new_group(backend, ...)",
            "torch.distributed:destroy_process_group(group)",
        ),
        uses=("torch.distributed:group.WORLD",),
        without="an engine has all the process groups that vLLM makes",
    ),
    "leaving memory where it is": Patch(
        file="patches/tuning.py",
        why="binding memory waits for every core of the machine, for minutes where engines decode",
        test=f"{_CONTRACT}/test_vllm.py::test_workers_bind_memory_where_there_is_a_choice",
        replaces=("torch:ops._C.init_cpu_memory_env",),
        uses=("vllm.utils.cpu_resource_utils:get_memory_affinity(pid)",),
        without="workers bind their memory, on machines with one memory node, too",
    ),
    "KV memory zeroed at first use": Patch(
        file="patches/tuning.py",
        why="engines write zeros over their whole KV cache when they start, for a second and more",
        test=f"{_CONTRACT}/test_start.py::test_a_kv_cache_is_zero_and_takes_no_memory_until_it_is_used",
        replaces=("vllm.v1.worker.utils:torch",),
        uses=(
            "vllm.v1.worker.utils:allocate_kv_cache(kv_cache_config, device, layout, kernel_block_sizes)",
            "vllm.v1.worker.utils~torch.zeros(buf_size, dtype=torch.int8, device=device)",
        ),
        without="engines touch all of their KV cache when they start",
    ),
    "compiling nothing": Patch(
        file="patches/tuning.py",
        why="eager engines compile some helpers at their first use, for ten seconds and more",
        test=f"{_CONTRACT}/test_vllm.py::test_what_vllm_marks_to_be_compiled_runs_as_it_is",
        replaces=("torch._dynamo:config.disable",),
        without="eager engines compile some helpers at their first use",
    ),
    "ranks on their slots": Patch(
        file="patches/tuning.py",
        why="OpenMP of a forked worker has read its cores before the fork",
        test=f"{_CONTRACT}/test_ranks.py::test_a_rank_begins_on_the_cores_of_its_slot",
        replaces=("vllm.utils.ompmultiprocessing:OMPProcessManager.configure_omp_envs(self, rank, local_rank)",),
        uses=("vllm.utils.ompmultiprocessing~self.cpu_lists",),
        without="the ranks of an engine share its cores",
    ),
    "NIXL's progress threads": Patch(
        file="patches/tuning.py",
        why="NIXL's Python package makes each agent's thread poll without a pause",
        test=f"{_CONTRACT}/test_pull.py::test_nixl_takes_what_makes_its_threads_sleep",
        replaces=("nixl._api:nixlBind.nixlAgentConfig.pthrDelay", "nixl._api:nixlBind.nixlAgentConfig.syncMode"),
        without="each engine keeps a core busy for as long as it lives",
        of="NIXL",
    ),
}  # fmt: skip

PATCHES: Final[Mapping[str, Patch]] = {
    **_FRONTEND,
    **_REQUESTS,
    **_PARKING,
    **_KV,
    **_ROUTING,
    **_PROCESSES,
    **_TUNING,
}
"""Patches by the names that log lines and errors give."""

KV_PATCHES: Final = tuple(_KV)
"""Without any one of these, an engine neither lends nor borrows KV."""
