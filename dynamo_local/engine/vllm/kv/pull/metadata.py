"""Messages between the scheduler's and the worker's side of the connector, with each step of one engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

from dynamo_local.engine.vllm.kv.pull.messages import PullCounts


class PullMetadata(NixlConnectorMetadata):
    """Scheduler to workers: the reads to start."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.deadlines: dict[str, float] = {}
        """Time before which each request's read has to be complete."""
        self.agents: dict[str, tuple[bytes, ...]] = {}
        """Agents of the engines to be read from, each by rank."""
        self.may_wait = False
        """Workers may wait for reads to end: the step computes nothing."""
        self.to_confirm: set[str] = set()
        """Requests whose reads do not count before a verdict."""
        self.verdicts: dict[str, bool] = {}
        """Whether what was read for these requests counts."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep empty metadata small: every step sends some, and nearly always there is nothing in it."""
        has_any = self.deadlines or self.may_wait or self.verdicts
        return (PullMetadata, (), self.__dict__) if has_any else (PullMetadata, ())

    def anon_repr(self) -> str:
        """What vLLM logs of it when a step has failed: agents have secrets."""
        return f"PullMetadata(deadlines={self.deadlines}, engines={list(self.agents)}, verdicts={self.verdicts})"

    def add_read(
        self, request_id: str, engine: str, ranks: tuple[bytes, ...], local: list[int], remote: list[int], until: float
    ) -> None:
        """Read `remote` blocks of `engine` into `local` ones, one to one."""
        # NIXL makes one piece of those that follow one another at both sides. A piece costs more than copying 16 KiB.
        pairs = sorted(zip(local, remote, strict=True))
        local, remote = [one for one, _ in pairs], [other for _, other in pairs]
        self.agents[engine] = ranks
        self.deadlines[request_id] = until
        self.add_new_req_to_recv(
            request_id,
            (local,),
            {
                "remote_block_ids": (remote,),
                "remote_engine_id": engine,
                # Sent to the source with the last byte. The source knows no such request.
                "remote_request_id": "",
                # Not connected to: vLLM takes it for the place at which an engine may be replaced by its successor.
                "remote_host": engine,
                "remote_port": 0,
                "tp_size": len(ranks),
            },
            awaiting_kvs=True,
        )


@dataclass
class ReadReport(KVConnectorWorkerMetadata):
    """Workers to scheduler: reads that were given up while something may still be written to their blocks, those
    of them that have ended since, and reads to be confirmed that have ended well (`read`) or `failed`. By request, each
    counted once a rank."""

    strayed: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    read: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)

    def __bool__(self) -> bool:
        return bool(self.strayed or self.ended or self.read or self.failed)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ReadReport:
        assert isinstance(other, ReadReport)
        return ReadReport(
            self.strayed + other.strayed,
            self.ended + other.ended,
            self.read + other.read,
            self.failed + other.failed,
        )


class KeptStats(KVConnectorStats):
    """`PullCounts`, on their way to the worker host with a step's other figures."""

    @classmethod
    def of(cls, counts: PullCounts) -> KeptStats:
        return cls(data=msgspec.to_builtins(counts))

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Take the later ones: they are counts of now, not of a step."""
        return other

    def reduce(self) -> dict[str, int | float]:
        return self.data

    def reset(self) -> None:
        self.data = {}
