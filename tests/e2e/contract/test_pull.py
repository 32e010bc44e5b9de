"""Prefix pull is held to the pinned vLLM and NIXL: an upgrade that breaks something breaks here."""

from __future__ import annotations

import importlib
import inspect
import random
import re
import time
from collections import Counter, defaultdict
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import msgspec
import pytest

from dynamo_local.core.messages.work import Submit

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.config import CacheConfig, KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.logging_utils.dump_input import prepare_object_to_dump
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import UtilityOutput
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request
from vllm.v1.worker import kv_connector_model_runner_mixin
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from dynamo_local.engine.kv.confirmations import Confirmations
from dynamo_local.engine.kv.leases import Key, Leases
from dynamo_local.engine.vllm.environment import IMPORT_DEFAULTS
from dynamo_local.engine.vllm.kv.agents import ReaderThread
from dynamo_local.engine.vllm.kv.identity import BlockHasher, unsupported_layers
from dynamo_local.engine.vllm.kv.pull import scheduler as pull_scheduler
from dynamo_local.engine.vllm.kv.pull.connector import PrefixPullConnector
from dynamo_local.engine.vllm.kv.pull.messages import (
    FORGOTTEN_S,
    Description,
    Handle,
    Pull,
    PullCounts,
    TransferParams,
)
from dynamo_local.engine.vllm.kv.pull.metadata import KeptStats, PullMetadata
from dynamo_local.engine.vllm.kv.pull.scheduler import PullScheduler, _Blocks
from dynamo_local.engine.vllm.kv.pull.worker import PullWorker
from dynamo_local.engine.vllm.kv.source import PullSource, StepFence
from dynamo_local.engine.vllm.patches.kv import report_references
from dynamo_local.engine.vllm.patches.tuning import PROGRESS_TIMEOUT_US, sleeping_progress_threads
from dynamo_local.engine.vllm.requests import wire

PATIENCE_S = 60.0

COUNTS = PullCounts(
    blocks=10, used_blocks=5, kept_blocks=2, leases=1, reads=0, blocks_read=0, scheduled_steps=7, ended_steps=7
)


@pytest.mark.parametrize(
    ("ours", "theirs", "overridden"),
    [
        (
            PrefixPullConnector,
            NixlBaseConnector,
            {
                "bind_gpu_block_pool", "build_connector_worker_meta", "build_kv_connector_stats",
                "get_kv_connector_stats", "start_load_kv",
            },
        ),
        (
            PullScheduler,
            NixlPullConnectorScheduler,
            {
                "build_connector_meta", "get_num_new_matched_tokens", "has_pending_push_work", "on_new_request",
                "request_finished", "set_xfer_handshake_metadata", "update_connector_output",
                "update_state_after_alloc",
            },
        ),
        (
            PullWorker,
            NixlPullConnectorWorker,
            {
                "_cleanup_remote_engine", "_engines_with_inflight_transfers", "_get_new_notifs", "_nixl_handshake",
                "_read_blocks_for_req", "get_transfer_results", "shutdown", "start_load_kv",
            },
        ),
    ],
)  # fmt: skip
def test_exactly_these_methods_are_overridden_with_the_same_parameters(
    ours: type, theirs: type, overridden: set[str]
) -> None:
    inherited = {name for name in vars(ours) if hasattr(theirs, name) and not name.startswith("__")}
    assert {name for name in inherited if callable(getattr(ours, name))} == overridden
    for name in overridden:
        mine, other = (list(inspect.signature(getattr(cls, name)).parameters) for cls in (ours, theirs))
        assert mine == other, name


def test_none_of_our_attributes_is_one_of_vllms() -> None:
    scheduler = inspect.getsource(NixlBaseConnectorScheduler) + inspect.getsource(NixlPullConnectorScheduler)
    worker = inspect.getsource(NixlBaseConnectorWorker) + inspect.getsource(NixlPullConnectorWorker)
    for ours, theirs in ((PullScheduler, scheduler), (PullWorker, worker)):
        names = re.findall(r"self\.(\w+)(?:: [^=\n]+)? = ", inspect.getsource(ours))
        assert names
        # In the place of vLLM's there is one that has it.
        taken = [name for name in names if name != "nixl_wrapper" and re.search(rf"self\.{name}\b", theirs)]
        assert not taken


def test_a_connector_sees_every_step_come_and_go_once() -> None:
    scheduler = inspect.getsource(Scheduler)
    assert inspect.getsource(Scheduler.schedule).count("self._build_kv_connector_meta(self.connector,") == 1
    assert scheduler.count("return connector.build_connector_meta(scheduler_output)") == 1
    assert inspect.getsource(Scheduler.update_from_output).count("self.connector.get_kv_connector_stats()") == 1
    assert scheduler.count("self.connector.get_kv_connector_stats()") == 1


@pytest.mark.parametrize("reading", [True, False])
def test_what_is_to_be_read_is_begun_before_the_step_computes(monkeypatch: pytest.MonkeyPatch, reading: bool) -> None:
    """Without reads to begin, the worker looks after its reads behind the computation, as vLLM has it."""
    scheduler = PullScheduler.__new__(PullScheduler)
    scheduler._fence, scheduler._posted, scheduler._strays = StepFence(), {}, Counter()
    scheduler.confirmations = Confirmations(1)
    scheduler._reading = {"r": [1]} if reading else {}
    scheduler.source = create_autospec(PullSource, instance=True)
    output = SchedulerOutput.make_empty()
    output.kv_connector_metadata = scheduler.build_connector_meta(output)
    connector = create_autospec(PrefixPullConnector, instance=True)
    monkeypatch.setattr(kv_connector_model_runner_mixin, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(kv_connector_model_runner_mixin, "get_forward_context", lambda: None)
    monkeypatch.setattr(kv_connector_model_runner_mixin, "has_kv_transfer_group", lambda: True)
    with KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output):
        assert connector.start_load_kv.called is reading
    connector.start_load_kv.assert_called_once()


def test_aborts_come_before_completions_and_failures_before_both() -> None:
    for step in (EngineCore.step, EngineCore.step_with_batch_queue):
        source = inspect.getsource(step)
        assert source.index("_process_aborts_queue()") < source.index("update_from_output(")
    update = inspect.getsource(Scheduler.update_from_output)
    assert update.index("_handle_failed_recving(") < update.index("_update_from_kv_xfer_finished(")
    # Strays are leased while the request still has its blocks.
    finish = inspect.getsource(Scheduler._update_from_kv_xfer_finished)
    assert finish.index("update_connector_output(") < finish.index("_free_blocks(")


def test_a_utility_method_may_answer_later() -> None:
    answers: list[UtilityOutput] = []
    later: Future[int] = Future()
    EngineCoreProc._invoke_utility_method("pin", lambda: later, UtilityOutput(1), answers.append)
    assert not answers
    later.set_result(5)
    assert answers[0].result is not None
    assert answers[0].result.result == 5


def test_blocks_are_found_kept_and_given_up_through_vllms_pool() -> None:
    hashes = BlockHasher(CacheConfig(block_size=32))
    pool = BlockPool(num_gpu_blocks=6, enable_caching=True, hash_block_size=32)
    tokens = list(range(96))
    request = Request("r", tokens, SamplingParams(max_tokens=1), None, block_hasher=hashes._hasher)
    own = pool.get_new_blocks(3)
    pool.cache_full_blocks(request, own, 0, 3, 32, 0)
    adapter = _Blocks(pool)
    found = [adapter.find(block_hash) for block_hash in hashes(tokens, None)]
    assert found == [block.block_id for block in own]
    ids = [block.block_id for block in own]
    adapter.refer(ids)
    pool.free_blocks(reversed(own))
    assert pool.get_num_free_blocks() == 2
    assert not {block.block_id for block in pool.get_new_blocks(2)} & set(ids)
    adapter.give_up(ids)
    # The last of a context is reused first.
    assert pool.get_new_blocks(1)[0].block_id == ids[2]
    assert not adapter.stands(ids[2], hashes(tokens, None)[2])
    assert adapter.stands(ids[0], hashes(tokens, None)[0])


def test_references_of_all_kinds_are_told_of_as_vllm_takes_and_gives_them_up() -> None:
    pool = BlockPool(num_gpu_blocks=12, enable_caching=True, hash_block_size=32)
    adapter = _Blocks(pool)
    leases = Leases(adapter, 12)
    report_references(pool, leases.note)
    drawn = random.Random(5)
    requests: list[list[Any]] = []
    kept = []
    for number in range(300):
        match drawn.randrange(4):
            case 0 if pool.get_num_free_blocks() >= 2:
                requests.append(pool.get_new_blocks(2))
            case 1 if requests:
                # Another one finds them in the cache.
                found = list(drawn.choice(requests))
                pool.touch(found)
                requests.append(found)
            case 2 if requests:
                pool.free_blocks(reversed(requests.pop(drawn.randrange(len(requests)))))
            case 3 if requests:
                blocks = [block.block_id for block in drawn.choice(requests)]
                leases.take(Key("pin", str(number)), blocks, number + drawn.randrange(20))
            case _:
                pass
        leases.expire(number)
        used = {block.block_id for blocks in requests for block in blocks}
        kept.append(leases.kept())
        assert kept[-1] == len(leases.references.keys() - used)
    assert max(kept) > 2


def test_hashes_are_the_same_in_every_process_and_salted() -> None:
    tokens = list(range(70))
    plain = BlockHasher(CacheConfig(block_size=32))(tokens, None)
    assert plain == BlockHasher(CacheConfig(block_size=32))(tokens, None)
    salted = BlockHasher(CacheConfig(block_size=32))(tokens, "salt")
    assert len(plain) == len(salted) == 2
    assert not set(plain) & set(salted)
    assert len(plain[0]) == 32


def test_every_incarnation_has_an_engine_id_of_its_own_and_buffers_on_its_device() -> None:
    one, other = KVTransferConfig(), KVTransferConfig()
    assert one.engine_id != other.engine_id
    assert one.kv_buffer_device == current_platform.device_type


def test_only_full_attention_is_supported() -> None:
    shape: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    full = KVCacheGroupSpec(["layer"], FullAttentionSpec(**shape))
    sliding = KVCacheGroupSpec(["layer"], SlidingWindowSpec(**shape, sliding_window=128))
    for groups, supported in (([full], True), ([sliding], False), ([full, full], False), ([full, sliding], False)):
        cache: Any = SimpleNamespace(kv_cache_groups=groups)
        assert (unsupported_layers(cache) is None) is supported


@pytest.mark.parametrize(("size", "lends"), [(10, True), (70_000, False)])
def test_metadata_that_is_too_long_is_told_of_instead(monkeypatch: pytest.MonkeyPatch, size: int, lends: bool) -> None:
    scheduler = PullScheduler.__new__(PullScheduler)
    monkeypatch.setattr(pull_scheduler, "identity_of", lambda *_: {})
    monkeypatch.setattr(pull_scheduler, "unsupported_layers", lambda _: None)
    monkeypatch.setattr(PullScheduler, "_block_bytes", lambda _: 1)
    scheduler.engine_id, scheduler.block_size, scheduler._compatibility = "e", 32, ""
    scheduler.vllm_config = scheduler.kv_cache_config = create_autospec(object)
    scheduler._agents = (b"a" * size,)
    told = msgspec.convert(msgspec.to_builtins(scheduler.describe(), builtin_types=(bytes,)), Description)
    assert (told.unsupported is None, len(told.agents)) == (lends, int(lends))


def test_nixl_takes_what_makes_its_threads_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    api: Any = importlib.import_module("nixl._api")
    bindings = api.nixlBind
    made: list[Any] = []
    monkeypatch.setattr(bindings, "nixlAgent", lambda name, config: made.append(config))
    config = bindings.nixlAgentConfig()
    config.pthrDelay = 0
    with sleeping_progress_threads():
        api.nixlBind.nixlAgent("agent", config)
    assert made[0].pthrDelay == PROGRESS_TIMEOUT_US
    assert made[0].syncMode == bindings.NIXL_THREAD_SYNC_STRICT
    assert api.nixlBind is bindings
    source = inspect.getsource(api.nixl_agent.__init__)
    assert "nixlBind.nixlAgent(agent_name, agent_config)" in source


def test_locks_that_nixls_threads_share_can_be_slept_on() -> None:
    package = Path(importlib.import_module("nixl_cu12").__file__ or "").parent
    (library,) = package.with_name("nixl_cu12.libs").glob("libucp-*.so*")
    name = next(name for name in IMPORT_DEFAULTS if "MUTEX" in name)
    assert name.removeprefix("UCX_").encode() + b"\0" in library.read_bytes()


def test_vllm_does_with_transfers_what_our_thread_stands_for() -> None:
    source = inspect.getsource(NixlBaseConnectorWorker) + inspect.getsource(NixlPullConnectorWorker)
    steps = ("make_prepped_xfer", "transfer", "check_xfer_state", "get_xfer_telemetry", "release_xfer_handle")
    for name in steps:
        assert f"self.nixl_wrapper.{name}(" in source
        ours, nixls = (getattr(of, name) for of in (ReaderThread, importlib.import_module("nixl._api").nixl_agent))
        assert callable(ours)
        assert callable(nixls)
    # NIXL's telemetry, which we have none of, goes nowhere else.
    assert source.count("get_xfer_telemetry") == source.count("self.xfer_stats.record_transfer(res)") == 1
    stats = NixlKVConnectorStats()
    stats.record_transfer(None)
    assert stats.is_empty()


def test_the_bases_still_have_what_we_hang_on_to() -> None:
    worker = inspect.getsource(NixlBaseConnectorWorker) + inspect.getsource(NixlPullConnectorWorker)
    for name in (
        "_recving_metadata", "_recving_transfers", "_recv_failures", "_failed_recv_reqs", "_remote_agents",
        "dst_num_blocks", "compat_hash", "use_host_buffer", "device_id", "tp_rank", "nixl_wrapper",
    ):  # fmt: skip
        assert f"self.{name}" in worker, name
    for name in (
        "_evict_stale_engines", "_pop_done_transfers", "_validate_remote_parallel_config", "add_remote_agent",
    ):  # fmt: skip
        assert hasattr(NixlBaseConnectorWorker, name), name
    assert hasattr(KVConnectorBase_V1, "bind_gpu_block_pool")
    assert "kv_connector_stats" in inspect.signature(Scheduler.make_stats).parameters


def test_nobody_but_us_tells_the_connector_what_to_do() -> None:
    sampling = msgspec.msgpack.encode(
        {"max_tokens": 5, "extra_args": {"kv_transfer_params": {"hold_s": 1e9}, "mine": 1}}
    )
    work = Submit(request_id="r", epoch=1, frontend="f", token_ids=[1], sampling=msgspec.Raw(sampling))
    params = wire.core_request_of(work).sampling_params
    assert params is not None
    assert params.extra_args == {"mine": 1}
    ours = wire.core_request_of(work, {"hold_s": 2.0})
    request = Request.from_engine_core_request(ours, None)
    assert request.kv_transfer_params == {"hold_s": 2.0}


def test_what_vllm_logs_of_a_step_that_has_failed_has_no_secrets() -> None:
    pull = Pull(Handle("far", (b"secret",), (5,)), (b"hash",), 1.0)
    transfer = msgspec.to_builtins(TransferParams(pull), builtin_types=(bytes,))
    sampling = msgspec.Raw(msgspec.msgpack.encode({"max_tokens": 5}))
    work = Submit(request_id="r", epoch=1, frontend="f", token_ids=[1, 2], sampling=sampling, key="key")
    request = Request.from_engine_core_request(wire.core_request_of(work, transfer), None)
    assert request.kv_transfer_params == transfer
    scheduler = PullScheduler.__new__(PullScheduler)
    scheduler._hold_s, scheduler._wanted, scheduler.block_size = {}, {}, 32
    scheduler.on_new_request(request)
    assert request.sampling_params is not None
    assert request.sampling_params.extra_args == {wire.KEY: "key"}
    meta = PullMetadata()
    meta.add_read("r", "far", (b"secret",), [1], [5], 1.0)
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [NewRequestData.from_request(request, ([1],))]
    output.kv_connector_metadata = meta
    logged = prepare_object_to_dump(output)
    assert "secret" not in logged
    assert "far" in logged
    # As it would be otherwise.
    assert "secret" in prepare_object_to_dump(vars(meta))


def test_an_engine_that_was_not_read_from_for_long_is_connected_to_again() -> None:
    worker = PullWorker.__new__(PullWorker)
    worker._deadlines, worker._to_confirm, worker._verdicts, worker._agents = {}, set(), {}, {}
    worker._engine_ttl, worker.tp_rank = FORGOTTEN_S, 0
    worker._recving_transfers, worker._stray_engines, worker._recving_metadata = defaultdict(list), {}, {}
    worker._remote_agents = {"idle": {(0, 0): "name"}, "other": {(0, 0): "name"}}
    now = time.perf_counter()
    worker._engine_last_active = {"idle": now - FORGOTTEN_S - 1, "other": now - FORGOTTEN_S + PATIENCE_S}
    evicted: list[str] = []

    def clean(engine: str) -> None:
        evicted.append(engine)
        del worker._remote_agents[engine]

    begun = create_autospec(NixlPullConnectorWorker.start_load_kv)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "_cleanup_remote_engine", clean)
        patch.setattr(NixlPullConnectorWorker, "start_load_kv", begun)
        worker.start_load_kv(PullMetadata())
        assert not evicted
        meta = PullMetadata()
        meta.add_read("r", "idle", (b"agent",), [1], [5], now + 60.0)
        worker.start_load_kv(meta)
    assert evicted == ["idle"]
    # What it takes to connect.
    assert worker._agents == {"idle": b"agent"}


def test_what_is_only_kept_for_readers_is_no_usage() -> None:
    stats = SchedulerStats(kv_cache_usage=0.5, kv_connector_stats=KeptStats.of(COUNTS).to_dict())
    load = wire.load_of(stats, keeps=True)
    assert load is not None
    assert (load.kv_usage, load.kv_pinned) == (0.3, 0.2)
    idle = wire.load_of(SchedulerStats(kv_cache_usage=0.5), keeps=True)
    assert idle is not None
    assert (idle.kv_usage, idle.kv_pinned) == (0.5, 0.0)
    without = wire.load_of(SchedulerStats(kv_cache_usage=0.5))
    assert without is not None
    assert without.kv_pinned is None


@pytest.mark.parametrize(
    ("params", "grows"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 0.0, "seed": 7}, True),
        ({"temperature": 1.0, "top_p": 0.9, "stop_token_ids": [3], "min_tokens": 4}, True),
        ({"repetition_penalty": 1.2, "logit_bias": {3: 1.0}, "logprobs": 2}, True),
        ({"temperature": 1.0, "seed": 7}, False),
        ({"presence_penalty": 1.0}, False),
        ({"frequency_penalty": 1.0}, False),
        ({"bad_words": ["no"]}, False),
        ({"structured_outputs": StructuredOutputsParams(regex="a+")}, False),
        ({"extra_args": {"of": "somebody"}}, False),
    ],
)
def test_only_requests_that_depend_on_nothing_but_their_context_grow_from_warm_ones(
    params: dict[str, Any], grows: bool
) -> None:
    assert wire.can_grow(msgspec.msgpack.encode(SamplingParams(**params))) is grows
