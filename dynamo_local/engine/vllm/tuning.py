"""Measures that make an engine cheap on a machine with few cores, all under one setting.

Known without importing vLLM: the setting is one of the worker's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_local.engine.vllm.engine_threads import SoftBinding


def tune_cpu_engine(binding: SoftBinding | None, *, eager: bool) -> None:
    """Tune this process and those forked from it, before an engine on a CPU is forked. Imports vLLM.

    `binding` is that of the engine to its slots' cores, if it has any; `eager`: the engine compiles no model.
    """
    from dynamo_local.engine.vllm.patches.processes.inherited_setup import configure_logging_once
    from dynamo_local.engine.vllm.patches.tuning.compilation import disable_compilation
    from dynamo_local.engine.vllm.patches.tuning.futex_wait import wait_without_spinning
    from dynamo_local.engine.vllm.patches.tuning.kv_memory import zero_kv_at_first_use
    from dynamo_local.engine.vllm.patches.tuning.memory_binding import skip_memory_binding
    from dynamo_local.engine.vllm.patches.tuning.rank_cores import start_ranks_on_their_slots
    from dynamo_local.engine.vllm.patches.tuning.torch_groups import share_process_groups
    from dynamo_local.process.ancestry import let_forks_lead_sessions

    skip_memory_binding()
    wait_without_spinning()
    share_process_groups()
    zero_kv_at_first_use()
    configure_logging_once()
    if eager:
        disable_compilation()
    if binding is not None:
        # vLLM binds the processes that it spawns only.
        binding.bind_forks()
        start_ranks_on_their_slots()
        # Linux schedules by session: threads that compute without a pause are in another one than those that wake up
        # for moments.
        let_forks_lead_sessions()
