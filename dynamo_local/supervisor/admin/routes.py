"""`dynamo route`: asks the routers of a running server for their latest assignments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from dynamo_local.core.errors import UsageError
from dynamo_local.core.fleet.view import ROUTER_ROLE
from dynamo_local.core.messages.routes import RouteRow, RoutesAnswer, RoutesQuestion, WeighedWorker
from dynamo_local.core.names import endpoint_of, short_watcher
from dynamo_local.core.request.told import told_id
from dynamo_local.core.routing.explanation import why
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.admin.connect import ask, bus_of
from dynamo_local.supervisor.admin.frontends import look
from state.paths import StatePaths

_ANSWER_WITHIN_S = 5.0


class CandidateLine(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that could have been chosen, by its watcher. `cost`: the lowest wins; of the policy `kv`, the expected
    time to the first token in seconds, the sum of `place_s` (until the worker can run the request), `prefill_s` (for
    the tokens queued before and those that it lacks) and `step_s`, which are null with other policies.
    `cached`, `uncached`: tokens of the request that it has, and lacks; `queued`: tokens that it has to compute before;
    `requests`: those that it has. `failed`: it had just failed the request."""

    worker: str
    cost: float
    cached: int
    uncached: int
    queued: int
    requests: int
    failed: bool
    place_s: float | None
    prefill_s: float | None
    step_s: float | None


class RouteLine(msgspec.Struct, frozen=True, kw_only=True):
    """An assignment of a request to a worker, by its watcher; None: none was ready. `cached`: tokens that it was
    expected to have cached, None if the policy does not ask. `pull_from`: the worker from which it was to pull more."""

    request: str
    endpoint: str
    revision: str
    tokens: int
    age_s: float
    worker: str | None
    cached: int | None
    pull_from: str | None
    why: str
    candidates: tuple[CandidateLine, ...]
    left_out: int
    """Number of candidates beside those in `candidates`, of higher costs."""


class RoutesView(msgspec.Struct, frozen=True, kw_only=True):
    """The latest assignments, the latest first, and the policy that has chosen."""

    policy: str
    routes: tuple[RouteLine, ...]


async def list_routes(
    paths: StatePaths, limit: int, request: str | None = None, endpoint: str | None = None
) -> RoutesView:
    """List the `limit` latest assignments, or those of one request (the id that its client knows, or its beginning) or
    of one endpoint among them. Raises UsageError without a router or such an endpoint, NotRunningError, BusError."""
    found, revisions = await look(paths, endpoint)
    routers = {row.lease: row.watcher for row in found if row.role == ROUTER_ROLE and row.lease is not None}
    if not routers:
        raise UsageError("this server has no router", "its frontend sends requests to the worker with the least to do")
    names = {row.lease: row.watcher for row in found if row.lease is not None}
    question = RoutesQuestion(limit if request is None else 2**31, None if endpoint is None else tuple(revisions))
    async with bus_of(paths, "route") as bus:
        # The subject is the graph's own: a router answers for all models.
        subjects = Subjects(paths.namespace)
        answers = [
            await ask(bus, watcher, subjects.routes(lease), question, RoutesAnswer, timeout_s=_ANSWER_WITHIN_S)
            for lease, watcher in routers.items()
        ]
    return view_of(answers, names, limit, request)


def view_of(
    answers: Sequence[RoutesAnswer], names: Mapping[str, str], limit: int, request: str | None = None
) -> RoutesView:
    """The answers of all routers as one. `names`: watchers by lease. Pure."""
    rows = sorted((row for answer in answers for row in answer.routes), key=lambda row: row.age_s)
    lines = [route_line(row, names) for row in rows if request is None or told_id(row.request_id).startswith(request)]
    return RoutesView(policy=answers[0].policy, routes=tuple(lines[:limit]))


def route_line(row: RouteRow, names: Mapping[str, str]) -> RouteLine:
    """An assignment with the names of workers, and the reason. A worker that is gone is named by its lease. Pure."""

    def name(lease: str) -> str:
        return names.get(lease, lease)

    return RouteLine(
        request=told_id(row.request_id),
        endpoint=endpoint_of(row.revision),
        revision=row.revision,
        tokens=row.tokens,
        age_s=round(row.age_s, 3),
        worker=None if row.worker is None else name(row.worker),
        cached=row.cached,
        pull_from=None if row.pull_from is None else name(row.pull_from),
        why=why(row, lambda lease: short_watcher(name(lease))),
        candidates=tuple(_candidate(each, name(each.worker)) for each in row.candidates),
        left_out=row.left_out,
    )


def _candidate(each: WeighedWorker, name: str) -> CandidateLine:
    return CandidateLine(
        worker=name,
        cost=each.cost,
        cached=each.cached,
        uncached=each.uncached,
        queued=each.queued,
        requests=each.requests,
        failed=each.failed,
        place_s=each.place_s,
        prefill_s=each.prefill_s,
        step_s=each.step_s,
    )
