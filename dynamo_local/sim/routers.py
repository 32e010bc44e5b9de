"""The router of a simulation: the production policies, index and ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from dynamo_local.core.messages.kv import KvChanges
from dynamo_local.core.messages.presence import EngineInfo, Load, Presence
from dynamo_local.core.messages.routing import AssignRequest
from dynamo_local.core.ports import CacheChanges
from dynamo_local.core.routing.ledger import Ledger
from dynamo_local.core.routing.policies import Freest, RoutingPolicy, SoonestFirstToken
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.sim.requests import Arrival

_FRONTEND = "frontend"


@dataclass(frozen=True)
class Placement:
    """A worker for a request. `cached`: tokens that it is expected to have; `pull_from`: who has more of them."""

    worker: str
    cached: int = 0
    pull_from: str | None = None


class PolicyRouter:
    """Places requests by a policy, as the router service does."""

    def __init__(self, policy: RoutingPolicy, workers: Sequence[str], settings: MockerSettings, *, pulls: bool) -> None:
        """`pulls`: whether prefixes are pulled."""
        self._policy = policy
        self.needs_loads = isinstance(policy, Freest | SoonestFirstToken)
        self._block_tokens = settings.mocker_block_size
        self._ledger = Ledger()
        self._told: Counter[str] = Counter()
        self._settings = settings
        self._no_transfer = None if pulls else "not simulated"
        self._workers = [presence_of(name, settings, self._no_transfer) for name in workers]

    def place(self, arrival: Arrival, now: float) -> Placement:
        request = AssignRequest(
            str(arrival.number),
            _FRONTEND,
            arrival.prompt_tokens,
            blocks=arrival.packed(self._block_tokens) if self._policy.needs_blocks else b"",
            block_tokens=self._block_tokens,
        )
        choice = self._policy.choose(request, self._workers, self._ledger, now)
        assert choice is not None, "a fleet without workers"
        cached = choice.cached or 0
        self._charge(request, choice.worker, cached, now)
        return Placement(choice.worker, cached, choice.pull_from)

    def place_at(self, arrival: Arrival, worker: str, now: float) -> Placement:
        """Place a request at that worker, whatever the policy would say."""
        request = AssignRequest(str(arrival.number), _FRONTEND, arrival.prompt_tokens)
        self._charge(request, worker, 0, now)
        return Placement(worker)

    def _charge(self, request: AssignRequest, worker: str, cached: int, now: float) -> None:
        self._ledger.charge(
            _FRONTEND,
            request.request_id,
            worker,
            request.tokens,
            now,
            uncached=request.tokens - cached,
            blocks=request.blocks,
        )

    def reported(self, loads: Mapping[str, Load]) -> None:
        """Go by these loads from now on."""
        self._workers = [replace(worker, load=loads[worker.lease]) for worker in self._workers]

    def first_token(self, arrival: Arrival) -> None:
        self._ledger.prefilled(_FRONTEND, str(arrival.number))

    def join(self, worker: str) -> None:
        """Place requests at a worker that has not been known until now, as well."""
        self._workers.append(presence_of(worker, self._settings, self._no_transfer))

    def moved(self, arrival: Arrival, worker: str, tokens: int, now: float) -> None:
        """Note that a request goes on at another worker."""
        self._ledger.charge(_FRONTEND, str(arrival.number), worker, tokens, now, uncached=0)

    def ended(self, arrival: Arrival) -> None:
        self._ledger.release(_FRONTEND, str(arrival.number))

    def cache_changed(self, worker: str, changes: CacheChanges) -> None:
        self._told[worker] += 1
        message = KvChanges(worker, self._told[worker], changes.removed, changes.stored, changes.cleared)
        self._ledger.index.apply(message)


def presence_of(name: str, settings: MockerSettings, no_transfer: str | None = None) -> Presence:
    """A simulated worker, without its load."""
    engine = EngineInfo(
        engine="mocker",
        model="simulated",
        max_model_len=settings.context_limit,
        block_size=settings.mocker_block_size,
        kv_blocks=settings.mocker_kv_blocks,
        max_num_seqs=settings.mocker_max_num_seqs,
        no_transfer=no_transfer,
        kv_events=settings.mocker_prefix_caching,
    )
    return Presence(name, "worker", "worker", name, 0, "ready", engine=engine)
