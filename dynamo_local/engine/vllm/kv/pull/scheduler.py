"""The scheduler's side of prefix pull: runs in the engine core's process, inside its loop.

As a **source** it leases cached blocks by content hash, to readers and to finished requests that somebody else goes on
with. As a **destination** it has the worker processes read the blocks that a request lacks.

No request is known to two engines. So what vLLM's NIXL connector does about remote requests (heartbeats, delayed
frees, an open port for handshakes) is not used.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import BlockIds
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from dynamo_local.engine.kv.confirmations import Confirmations
from dynamo_local.engine.kv.leases import Key
from dynamo_local.engine.vllm.kv.identity import identity_of, unsupported_layers
from dynamo_local.engine.vllm.kv.pull.messages import (
    NET_DEVICE,
    STREAM_HOST,
    TRANSFER,
    Description,
    Pull,
    PullCounts,
    TransferParams,
    why_not_told,
)
from dynamo_local.engine.vllm.kv.pull.metadata import KeptStats, PullMetadata, ReadReport
from dynamo_local.engine.vllm.kv.source import PullSource, StepFence
from dynamo_local.engine.vllm.patches.kv import report_references

logger = init_logger(__name__)

_HELD_ENDS = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class _Blocks:
    """vLLM's block pool as `source.CachePool`."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def total(self) -> int:
        return self._pool.num_gpu_blocks

    def refer(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def give_up(self, blocks: Sequence[int]) -> None:
        # vLLM reuses first what comes first.
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])

    def references_to(self, block: int) -> int:
        return self._pool.blocks[block].ref_cnt

    def find(self, block_hash: bytes) -> int | None:
        hit = self._pool.get_cached_block(BlockHash(block_hash), [0])
        return None if hit is None else hit[0].block_id

    def stands(self, block: int, block_hash: bytes) -> bool:
        key = make_block_hash_with_group_id(BlockHash(block_hash), 0)
        return self._pool.cached_block_hash_to_block.contain(key, block)


@dataclass(frozen=True)
class _Wanted:
    """Blocks that a request can have read: those of its context with indices from `start` up to `end`, and `rest`
    tokens in the one behind them."""

    pull: Pull
    start: int
    end: int
    rest: int


@dataclass(frozen=True)
class _Read:
    pull: Pull
    local: list[int]
    remote: list[int]


class PullScheduler(NixlPullConnectorScheduler):
    """Scheduler's side. `bind_pool` comes before everything but the constructor."""

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.source: PullSource
        self._pool: BlockPool
        self._fence = StepFence()
        self.confirmations = Confirmations(vllm_config.parallel_config.tensor_parallel_size)
        self._agents: tuple[bytes, ...] = ()
        self._compatibility = ""
        self._wanted: dict[str, _Wanted] = {}
        """Requests that are not admitted yet."""
        self._hold_s: dict[str, float] = {}
        """Seconds for which blocks are kept when their request has finished, by request."""
        self._posted: dict[str, _Read] = {}
        """Reads to go out with the next step."""
        self._reading: dict[str, list[int]] = {}
        """Blocks that are being read into, by request."""
        self._blocks_read = 0
        self._strays: Counter[str] = Counter()
        """Number of ranks that have given up a read which has not ended, by request."""

    def bind_pool(self, pool: BlockPool) -> None:
        self._pool = pool
        self.source = PullSource(_Blocks(pool), self._fence, time.monotonic)
        report_references(pool, self.source.leases.note)

    # For the engine core's utility methods, between steps

    def describe(self) -> Description:
        identity = identity_of(self.vllm_config, self.kv_cache_config)
        unsupported = unsupported_layers(self.kv_cache_config) or why_not_told(self._agents)
        return Description(
            engine=self.engine_id,
            agents=self._agents if unsupported is None else (),
            identity={**identity, "nixl": self._compatibility},
            block_size=self.block_size,
            block_bytes=self._block_bytes(),
            unsupported=unsupported,
        )

    def _block_bytes(self) -> int:
        config = self.kv_cache_config
        of_rank = sum(tensor.size for tensor in config.kv_cache_tensors) // config.num_blocks
        return of_rank * self.vllm_config.parallel_config.tensor_parallel_size

    def why_kept(self) -> str | None:
        """Say why blocks must stay as they are although no request runs; None if they need not."""
        assert self.vllm_config.kv_transfer_config is not None
        extra = self.vllm_config.kv_transfer_config.get_from_extra_config
        if extra(NET_DEVICE, "") or extra(STREAM_HOST, ""):
            return "the memory of KV that other machines read stays where it is (kv-network, kv-stream)"
        self.source.expire()
        if self._reading or self._strays:
            return "blocks of its KV cache are being read into"
        return "blocks of its KV cache are kept for readers" if len(self.source.leases) else None

    def stats(self) -> KeptStats:
        return KeptStats.of(self.counts())

    def counts(self) -> PullCounts:
        # Without the null block, which is never free and never used.
        blocks = len(self._pool.blocks) - 1
        return PullCounts(
            blocks=blocks,
            used_blocks=blocks - self._pool.get_num_free_blocks(),
            kept_blocks=self.source.leases.kept(),
            leases=len(self.source.leases),
            reads=len(self._reading),
            blocks_read=self._blocks_read,
            scheduled_steps=self._fence.scheduled,
            ended_steps=self._fence.ended,
        )

    # For vLLM's scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        """Keep what readers need to know. (vLLM's own opens a port at which they ask for it.)"""
        ranks = [metadata[0, rank] for rank in range(self.vllm_config.parallel_config.tensor_parallel_size)]
        payloads = [payload for payload in ranks if isinstance(payload, NixlHandshakePayload)]
        self._agents = tuple(map(msgspec.msgpack.encode, payloads))
        self._compatibility = payloads[0].compatibility_hash

    def on_new_request(self, request: Request) -> None:
        if not request.kv_transfer_params:
            return
        _keep_here(request)
        try:
            params = msgspec.convert(request.kv_transfer_params, TransferParams)
        except msgspec.ValidationError as error:
            logger.warning("the transfer parameters of %s are ignored: %s", request.request_id, error)
            return
        if params.hold_s > 0:
            self._hold_s[request.request_id] = params.hold_s
        wanted = self._locate(request, params.pull) if params.pull is not None else None
        if wanted is not None:
            self._wanted[request.request_id] = wanted

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Count the tokens beyond those cached here that are to be read."""
        wanted = self._wanted.get(request.request_id)
        cached = num_computed_tokens // self.block_size
        if wanted is None or not wanted.start <= cached < wanted.end or time.monotonic() >= wanted.pull.until:
            return 0, False
        return wanted.end * self.block_size + wanted.rest - num_computed_tokens, True

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The request is admitted. There is room for what was announced, unless vLLM does not want it after all."""
        wanted = self._wanted.pop(request.request_id, None)
        if wanted is None or num_external_tokens == 0:
            return
        cached = wanted.end - (num_external_tokens - wanted.rest) // self.block_size
        end = wanted.end + (wanted.rest > 0)
        local = list(blocks.get_block_ids()[0][cached:end])
        remote = list(wanted.pull.handle.blocks[cached - wanted.start : end - wanted.start])
        if wanted.pull.confirm:
            self.confirmations.begin(request.request_id, wanted.pull.confirm, wanted.pull.until)
        self._posted[request.request_id] = _Read(wanted.pull, local, remote)
        self._reading[request.request_id] = local
        self._blocks_read += len(local)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Count a step that is scheduled, and send its reads along. vLLM calls this once for every step."""
        self._fence.schedule()
        self.source.expire()
        meta = PullMetadata()
        meta.may_wait = bool(self._reading or self._strays) and scheduler_output.total_num_scheduled_tokens == 0
        for request_id, read in self._posted.items():
            handle = read.pull.handle
            meta.add_read(request_id, handle.engine, handle.agents, read.local, read.remote, read.pull.until)
            if read.pull.confirm:
                meta.to_confirm.add(request_id)
        self._posted.clear()
        if len(self.confirmations):
            self.confirmations.expire(time.monotonic())
            meta.verdicts = self.confirmations.take()
        if self._reading:
            # vLLM's workers begin to read before the step's computation then, not after it: a whole step earlier. That
            # delays the step by next to nothing, as another thread does the reading.
            scheduler_output.has_sync_kv_loads = True
        return meta

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Note the ends of reads, before vLLM acts on what the workers report."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, ReadReport):
            self._note_strays(report)
            self.confirmations.note(report.read)
            self.confirmations.fail(report.failed)
        for request_id in connector_output.finished_recving or ():
            self._reading.pop(request_id, None)
            self.confirmations.forget(request_id)

    def end_step(self) -> KeptStats | None:
        """Count a step that has ended. vLLM calls this once for every step."""
        self._fence.end()
        return self.stats() if len(self.source.leases) else None

    def request_finished(self, request: Request, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """Never delays the freeing of blocks: vLLM's engine core steps at full speed for as long as that lasts."""
        self._wanted.pop(request.request_id, None)
        hold_s = self._hold_s.pop(request.request_id, 0.0)
        if hold_s > 0 and request.status in _HELD_ENDS:
            self._hold(request.request_id, block_ids[0], hold_s)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Strays and reads to be confirmed are looked after by steps, even if there is nothing else to do."""
        return bool(self._strays) or len(self.confirmations) > 0

    def _locate(self, request: Request, pull: Pull) -> _Wanted | None:
        """Locate the blocks to be read in the context. Blocks of another context are found out by their hashes."""
        hashes = pull.hashes[: len(pull.handle.blocks)]
        own: list[bytes] = list(request.block_hashes)
        try:
            start = own.index(hashes[0])
        except (IndexError, ValueError):
            logger.warning("the pinned blocks for %s do not belong to its context", request.request_id)
            return None
        # Never all of the context: a token has to be computed to sample the next one, and vLLM would write that one's
        # KV into a block which stands in the cache.
        end = min(start + len(hashes), (request.num_tokens - 1) // self.block_size)
        if tuple(own[start:end]) != hashes[: end - start]:
            logger.warning("the pinned blocks for %s do not belong to its context", request.request_id)
            return None
        # Of the last block, that is read only behind all the others, and without the context's last token.
        has_rest = end - start == len(pull.hashes) < len(pull.handle.blocks)
        fits = end * self.block_size + pull.rest < request.num_tokens
        return _Wanted(pull, start, end, pull.rest if has_rest and fits else 0)

    def _hold(self, request_id: str, block_ids: Sequence[int], hold_s: float) -> None:
        full = [block for block in block_ids if self._pool.blocks[block].block_hash is not None]
        refused = self.source.hold(request_id, full, hold_s)
        if refused is not None:
            logger.warning("the blocks of %s are not held: %s", request_id, refused)

    def _note_strays(self, report: ReadReport) -> None:
        self._strays.update(report.strayed)
        for request_id in report.strayed:
            # The request is to be computed in blocks other than those that may still be written to.
            self.source.leases.strand(request_id, self._reading[request_id])
        self._strays.subtract(report.ended)
        for request_id in report.ended:
            if self._strays[request_id] == 0:
                del self._strays[request_id]
                self.source.leases.end(Key("stray", request_id))


def _keep_here(request: Request) -> None:
    """Take the transfer parameters out of what goes to the workers with a request. They need none, and vLLM logs all of
    it when a step has failed: agents have secrets."""
    sampling = request.sampling_params
    if sampling is not None and sampling.extra_args:
        sampling.extra_args = {name: value for name, value in sampling.extra_args.items() if name != TRANSFER} or None
