"""The worker's side of prefix pull: runs in each of an engine's worker processes, inside its steps.

What is read is read in a thread beside them (agents.ReaderThread).

A one-sided read does not notice that the blocks it reads are reused. The source promises not to reuse them before a
certain time, of a clock that both sides share; so a read counts if it was *seen* complete before that time. Where the
source is on another machine there is no such clock, and a read counts once the source has confirmed the pin after it
(confirmations.py); the time is then the reader's own, at which it gives up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlAgentMetadata,
    NixlConnectorMetadata,
    NixlHandshakePayload,
    RemoteMeta,
    ReqMeta,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.vllm.kv.agents import MemoryAgent, NetworkAgent, ReaderThread, bind_transport
from dynamo_local.engine.vllm.kv.pull.messages import CPU_TUNING, HOST_PID, NET_DEVICE, STREAM_HOST
from dynamo_local.engine.vllm.kv.pull.metadata import PullMetadata, ReadReport
from dynamo_local.engine.vllm.patches.kv import replaced_agents
from dynamo_local.engine.vllm.patches.tuning import sleeping_progress_threads

logger = init_logger(__name__)

_LOOK_EVERY_S = 0.5

_WAIT_S = 0.001
"""Time that a step which computes nothing waits for a read to end."""

_agent_decoder = msgspec.msgpack.Decoder(NixlAgentMetadata)


class PullWorker(NixlPullConnectorWorker):
    """Worker's side."""

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        # On a CPU, vLLM's connector binds the computing thread to the machine's last core, whatever cores the engine
        # was given.
        cores = os.sched_getaffinity(0)
        assert vllm_config.kv_transfer_config is not None
        extra = vllm_config.kv_transfer_config.get_from_extra_config
        self._host_pid: int = extra(HOST_PID, os.getpid())
        beside = partial(_run_beside, self._host_pid)
        with _agents(extra(NET_DEVICE, ""), extra(STREAM_HOST, ""), beside, tuned=extra(CPU_TUNING, True)):
            super().__init__(vllm_config, engine_id, kv_cache_config)
        os.sched_setaffinity(0, cores)
        self._reader = ReaderThread(self.nixl_wrapper, self._prepare_to_read)
        self.nixl_wrapper = self._reader
        self._deadlines: dict[str, float] = {}
        """Deadlines of reads that have neither succeeded nor been given up, by request."""
        self._agents: dict[str, bytes] = {}
        """Agent of the rank that is this one's counterpart, by engine that is not connected yet."""
        self._strays: dict[str, list[int]] = {}
        """Transfers that were given up and have not ended, by request."""
        self._stray_engines: dict[str, str] = {}
        self._report: ReadReport | None = None
        """Report of reads since the last step, if there is any to make."""
        self._to_confirm: set[str] = set()
        """Requests whose reads do not count before a verdict."""
        self._unsettled: set[str] = set()
        """Requests that have been read and have no verdict yet."""
        self._verdicts: dict[str, bool] = {}
        self._look_at = 0.0
        """Time of the next look for engines that cannot be read from any more, while nothing is being read."""
        self._may_wait = False

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        assert isinstance(metadata, PullMetadata)
        self._may_wait = metadata.may_wait
        self._to_confirm |= metadata.to_confirm
        self._verdicts.update((name, held) for name, held in metadata.verdicts.items() if name in self._to_confirm)
        if not metadata.deadlines and not self._deadlines:
            # Nothing to be read, and nothing that waits for its handshake.
            return
        # vLLM does this for engines that are new. A source ends a connection on which nothing is read for long, so that
        # the one to be read from now may have to be connected to again, too.
        self._evict_stale_engines()
        self._deadlines.update(metadata.deadlines)
        for engine, ranks in metadata.agents.items():
            if engine not in self._remote_agents:
                self._agents[engine] = ranks[self.tp_rank]
        super().start_load_kv(metadata)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        if self._may_wait and (self._recving_transfers or self._strays or self._unsettled):
            self._reader.wait(_WAIT_S)
        now = time.monotonic()
        if not self._deadlines and not self._strays and not self._unsettled and now < self._look_at:
            # Nothing is being read: looking for what has ended costs a part of every step.
            return KVConnectorTransferResults()
        self._look_at = now + _LOOK_EVERY_S
        self._give_up(now)
        results: KVConnectorTransferResults = super().get_transfer_results()
        # A read is seen complete now, not when it was.
        now = time.monotonic()
        for request_id in results.finished_recving:
            if now >= self._deadlines.pop(request_id, 0.0):
                results.failed_recving.add(request_id)
        self._withhold(results)
        if self._strays:
            ended, _ = self._pop_done_transfers(self._strays)
            self._reported().ended.update(ended)
            for request_id in ended:
                del self._stray_engines[request_id]
        return results

    def take_report(self) -> ReadReport | None:
        """Take the report of reads that were given up. Returns it once."""
        report, self._report = self._report, None
        return report or None

    def _reported(self) -> ReadReport:
        if self._report is None:
            self._report = ReadReport()
        return self._report

    def _withhold(self, results: KVConnectorTransferResults) -> None:
        """Keep back what is to be confirmed, until the verdict. The source is asked when all ranks have said that they
        have read."""
        for request_id in self._to_confirm & results.finished_recving:
            if request_id in results.failed_recving:
                self._reported().failed[request_id] += 1
                self._forget(request_id)
            else:
                self._reported().read[request_id] += 1
                results.finished_recving.discard(request_id)
                self._unsettled.add(request_id)
        for request_id in self._unsettled & self._verdicts.keys():
            results.finished_recving.add(request_id)
            if not self._verdicts[request_id]:
                results.failed_recving.add(request_id)
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._to_confirm.discard(request_id)
        self._unsettled.discard(request_id)
        self._verdicts.pop(request_id, None)

    def _give_up(self, now: float) -> None:
        """Let the reads fail whose time is over, whatever they wait for."""
        for request_id in [request_id for request_id, until in self._deadlines.items() if until <= now]:
            handles = self._recving_transfers.pop(request_id, None)
            if handles:
                # NIXL cannot take a read back: it may still write to its blocks.
                self._reader.give_up(handles)
                self._strays[request_id] = handles
                self._stray_engines[request_id] = _remote_of(self._recving_metadata[request_id]).engine_id
                self._reported().strayed[request_id] += 1
            self._recv_failures.add(request_id)

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        if self._recving_metadata.get(req_id) is not meta:
            # Given up while it waited for its handshake; the blocks may be another's by now.
            return
        remote = _remote_of(meta)
        known = self.dst_num_blocks.get(remote.engine_id)
        if known is not None and max(remote.block_ids[0]) >= known:
            self._failed_recv_reqs.put(req_id)
            return
        super()._read_blocks_for_req(req_id, meta)

    def _nixl_handshake(
        self,
        host: str,
        port: int,
        remote_tp_size: int,
        expected_engine_id: str,
        remote_dcp_size: int = 1,
        remote_pp_size: int = 1,
        notif_agents_only: bool = False,
    ) -> tuple[dict[tuple[int, int], str], float]:
        """Connect to an engine as vLLM does, by the agent that came with the pin instead of a question to a port.

        Runs in a thread of its own, where any exception makes the reads that wait for it fail.
        """
        self._use_device()
        payload = msgspec.msgpack.decode(self._agents.pop(expected_engine_id), type=NixlHandshakePayload)
        if payload.compatibility_hash != self.compat_hash:
            raise EngineError("the other engine's KV cache has another layout")
        agent = _agent_decoder.decode(payload.agent_metadata_bytes)
        if agent.engine_id != expected_engine_id:
            raise EngineError("the agent belongs to another engine than the pin")
        self._validate_remote_parallel_config(agent)
        name = self.add_remote_agent(agent, self.tp_rank, remote_tp_size, agent.dcp_size)
        return {(0, self.tp_rank): name}, 0.0

    def _use_device(self) -> None:
        """NVLink and the like are used only by threads that have a CUDA context."""
        if not self.use_host_buffer:
            current_platform.set_device(self.device_id)  # type: ignore[arg-type]  # as vLLM does

    def _prepare_to_read(self) -> None:
        self._use_device()
        _run_beside(self._host_pid)

    def _get_new_notifs(self) -> set[str]:
        """Return no notifications: readers send none."""
        return set()

    def shutdown(self) -> None:
        self._reader.close()
        super().shutdown()

    def _engines_with_inflight_transfers(self) -> set[str]:
        return super()._engines_with_inflight_transfers() | set(self._stray_engines.values())

    def _cleanup_remote_engine(self, engine_id: str, *, log_eviction: bool = True) -> None:
        self._agents.pop(engine_id, None)
        super()._cleanup_remote_engine(engine_id, log_eviction=log_eviction)


def _run_beside(host_pid: int) -> None:
    """Have this thread run where the worker's host does: that is kept off the cores of engines that decode, this one's
    among them, if there are others."""
    os.sched_setaffinity(0, os.sched_getaffinity(host_pid))


@contextmanager
def _agents(net_device: str, stream_host: str, beside: Callable[[], None], *, tuned: bool) -> Iterator[None]:
    """The context in which vLLM's connector makes its agent. `net_device`: the interface on which engines of other
    machines read; `stream_host`: the address at which they read on a stream, whose threads begin with `beside`."""
    on_cpu = current_platform.is_cpu()
    if net_device:
        bind_transport(net_device, only_tcp=on_cpu)
    with ExitStack() as stack:
        if on_cpu:
            stack.enter_context(replaced_agents(own_agent(net_device, stream_host, beside)))
        if tuned and (net_device or not on_cpu):
            stack.enter_context(sleeping_progress_threads())
        yield


def own_agent(net_device: str, stream_host: str, beside: Callable[[], None]) -> Callable[..., Any]:
    """Return what makes the agent of an engine on a CPU. It raises EngineError if it cannot listen at `stream_host`."""
    if not stream_host:
        return NetworkAgent if net_device else MemoryAgent
    # Imported here: what makes certificates takes a while to import.
    from dynamo_local.engine.vllm.kv.stream.agent import StreamAgent

    return lambda name, config=None: NetworkAgent(name, config, StreamAgent(stream_host, beside))


def _remote_of(meta: ReqMeta) -> RemoteMeta:
    assert meta.remote is not None
    return meta.remote
