"""Starts vLLM's engine core, in processes that are forked or spawned from the calling thread."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

from dynamo_local.core.errors import EngineError
from dynamo_local.core.ports import Progress
from dynamo_local.engine.kv.network import (
    NO_FAR_KV,
    FarKv,
    NetworkSettings,
    check_events_config,
    far_kv_here,
    other_users,
    why_port_forbidden,
)
from dynamo_local.engine.vllm.arguments import chooses_log, engine_schema, to_argv
from dynamo_local.engine.vllm.environment import settle_threads
from dynamo_local.engine.vllm.kv.cache_changes import let_engines_tell_of_caches
from dynamo_local.engine.vllm.kv.pull.messages import CPU_TUNING, FORGOTTEN_S, HOST_PID, NET_DEVICE, STREAM_HOST
from dynamo_local.engine.vllm.parking import let_engines_park
from dynamo_local.engine.vllm.patches.table import applies, require
from dynamo_local.engine.vllm.patches.tuning import tune_cpu_engine
from dynamo_local.engine.vllm.processes import EngineThreads, SoftBinding
from dynamo_local.engine.vllm.settings import AdapterSettings, ListAdapters, VllmSettings
from dynamo_local.process.ancestry import prepare_forks
from dynamo_local.process.forkserver.prepared.orders import PreparedOrder
from dynamo_local.sdk.config.schema import build_settings

_log = logging.getLogger(__name__)

NO_TRANSFER = "the engine is not set up for KV transfer (kv-transfer)"


@dataclass(frozen=True)
class Launched:
    """Engine core that runs."""

    core: Any
    """vLLM's client of it."""
    vllm_config: Any
    adapters: Any
    """A lora.Adapters."""
    identity: Mapping[str, str] | None
    """Identity of its model (identity.model_identity). None: its KV is not transferred."""
    no_transfer: str | None
    """Reason why its KV is not transferred."""
    far: FarKv
    """How its KV is read by other machines."""
    weights: PreparedOrder | None
    """Order for a process that has loaded its weights; None if they are not shared."""


def launch(
    config: dict[str, Any],
    kv_transfer: bool,
    threads: EngineThreads,
    binding: SoftBinding | None,
    listed: ListAdapters | None,
    parks: bool,
    bus_host: str,
    progress: Progress,
) -> Launched:
    """Import vLLM, start its engine core, and wait until that has loaded the model. `parks`: the engine is to be able
    to park. `bus_host`: see VllmEngine."""
    progress("importing vLLM")
    require("continuing requests")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor.abstract import Executor

    from dynamo_local.engine.vllm.patches.requests import patch_requests
    from dynamo_local.engine.vllm.requests.lora import Adapters
    from dynamo_local.engine.vllm.weights import settle_weights

    progress("reading the model's configuration")
    parsed = engine_parser().parse_args(to_argv(with_log(config), engine_schema()))
    configured = build_settings(AdapterSettings, "the engine", config).adapters
    adapters = Adapters(configured, enabled=bool(parsed.enable_lora), listed=listed)
    adapters.check(parsed.model)

    def configuration(transfer: Any = None) -> Any:
        # vLLM changes some of them in place.
        args = AsyncEngineArgs.from_cli_args(deepcopy(parsed))
        check_events_config(args.kv_events_config)
        if config.get("scheduling-policy") is None:
            # Requests bring priorities, which vLLM's default policy ignores. Among equals it changes nothing.
            args.scheduling_policy = "priority"
        if config.get("max-loras") is None:
            adapters.leave_slots(args)
        if current_platform.is_cpu():
            adapters.make_room(args)
        if transfer is not None:
            args.kv_transfer_config = transfer
        elif parks and current_platform.is_sleep_mode_available():
            # Memory is allocated in another way then. An engine that lends KV is not parked on GPUs (parking.py).
            args.enable_sleep_mode = True
        return args.create_engine_config()

    ours = build_settings(VllmSettings, "the engine", config)
    # In ordinary memory, KV is read without a port.
    wanted_network = build_settings(NetworkSettings, "the engine", config)
    users = other_users() if wanted_network.kv_network or not current_platform.is_cpu() else []
    forbidden = why_port_forbidden(users, trusted=ours.trust_local_users)
    no_stream = None if current_platform.is_cpu() else "streams are of engines on CPUs (kv-stream)"
    far = far_kv_here(wanted_network, bus_host=bus_host, no_port=forbidden, no_stream=no_stream)
    open_port = None if current_platform.is_cpu() else forbidden
    tuned = ours.cpu_tuning
    vllm_config, identity, no_transfer = _set_up_transfer(configuration, kv_transfer, open_port, tuned=tuned, far=far)
    if current_platform.is_cpu():
        # Creating the configuration has just forced "spawn", which imports vLLM anew in every process. Nothing that
        # forbids forking (OpenMP threads, a CUDA context) has started yet, and forked processes need no import.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        if tuned:
            tune_cpu_engine(binding, eager=vllm_config.model_config.enforce_eager)
    wanted = ours.prepared_weights and tuned and current_platform.is_cpu()
    weights = settle_weights(vllm_config, config, wanted=wanted)
    # The number of OpenMP threads belongs to a thread, and the engine's processes are forked from this one.
    settle_threads(os.environ)
    prepare_forks()
    threads.forked_here()
    # For forked processes; spawned ones load plugin.py.
    patch_requests()
    let_engines_park()
    let_engines_tell_of_caches()
    progress("loading the model")
    core = EngineCoreClient.make_async_mp_client(
        vllm_config=vllm_config, executor_class=Executor.get_class(vllm_config), log_stats=True
    )
    return Launched(core, vllm_config, adapters, identity, no_transfer, far, weights)


def with_log(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the level of vLLM's log at which it writes what is asked for, unless a level is given."""
    details = config.get("enable-logging-iteration-details") and not chooses_log(config)
    return {**config, "log-level": "INFO"} if details else dict(config)


@cache
def engine_parser() -> Any:
    """vLLM's parser of the engine's arguments. Forked processes have that of the fork server."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())


def _set_up_transfer(
    configuration: Callable[..., Any],
    wanted: bool,
    forbidden: str | None = None,
    *,
    tuned: bool = True,
    far: FarKv = NO_FAR_KV,
) -> tuple[Any, Mapping[str, str] | None, str | None]:
    """Make vLLM's configuration, with KV transfer if it is wanted and possible.

    Returns it with the identity of the model, or with the reason why KV is not transferred. `forbidden` is such a
    reason; `tuned`: see patches/tuning.py. vLLM refuses to configure some models with a KV connector, so the first
    configuration has none, unless an engine of the same model was configured with one.
    """
    from dynamo_local.engine.vllm.kv.identity import model_identity, why_not_lent
    from dynamo_local.engine.vllm.weights import was_lent

    if wanted and forbidden is None and was_lent():
        vllm_config = configuration(_transfer_config(tuned, far))
        return vllm_config, model_identity(vllm_config, far.network), None
    vllm_config = configuration()
    if not wanted:
        return vllm_config, None, NO_TRANSFER
    if not applies("KV transfer"):
        return vllm_config, None, "KV transfer does not know this version of vLLM"
    if vllm_config.kv_transfer_config is not None:
        what = "kv-transfer excludes kv-transfer-config and kv-offloading-size"
        raise EngineError(what, "leave out either it or them")
    why = forbidden or why_not_lent(vllm_config)
    if why is not None:
        _log.warning("kv-transfer is off, this engine transfers no KV: %s", why)
        return vllm_config, None, why
    return configuration(_transfer_config(tuned, far)), model_identity(vllm_config, far.network), None


def _transfer_config(tuned: bool, far: FarKv) -> Any:
    """Make vLLM's configuration of the connector for prefix pull."""
    from vllm.config import KVTransferConfig

    # Buffers are on the engine's own device, and every start makes an engine id of its own: vLLM's defaults.
    return KVTransferConfig(
        kv_connector="PrefixPullConnector",
        kv_connector_module_path="dynamo_local.engine.vllm.kv.pull.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            # Dead ones mostly.
            "engine_ttl": FORGOTTEN_S,
            # No threads that share the work of many small reads: on one machine there is not so much.
            "num_threads": 0,
            HOST_PID: os.getpid(),
            CPU_TUNING: tuned,
            NET_DEVICE: far.device,
            STREAM_HOST: far.host,
        },
    )
