"""/metrics of all frontends of a server: whichever is asked asks the others, and shows the metrics of all together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from components.frontend.http.outgoing import answer
from components.frontend.request_context import request_here
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import BusError, DecodeError
from dynamo_local.core.fleet.view import FRONTEND_ROLE
from dynamo_local.core.http.asgi import App, Receive, Scope, Send
from dynamo_local.core.http.paths import METRICS
from dynamo_local.core.messages.reports import MetricFamily, MetricsAnswer, MetricShare, MetricsQuestion
from dynamo_local.core.metrics.shares import counters, ended_together, together
from dynamo_local.core.subjects import Subjects
from dynamo_local.log_once import LogOnce
from dynamo_local.monitor.exposition import CONTENT_TYPE, collected, families, written
from dynamo_local.monitor.metrics import FRONTENDS, FRONTENDS_UNREAD, Sample, across_frontends

_log = logging.getLogger(__name__)

_ANSWER_WITHIN_S = 2.0
"""Prometheus itself waits for ten seconds, `dynamo top` for four."""


class FrontendMetrics:
    """The metrics of one frontend, and those of the others."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        lease: str,
        fleet: FleetWatch,
        by_key: Callable[[], Iterable[Sample]],
        collect: Callable[[], tuple[MetricFamily, ...]] = collected,
    ) -> None:
        """`fleet`: the server's own processes. `collect` returns the metrics of this process, `by_key` those of usage
        by API key, which only administrators are shown."""
        self._bus = bus
        self._subjects = subjects
        self._lease = lease
        self._fleet = fleet
        self._by_key = by_key
        self._collect = collect
        self._log_once = LogOnce(_log)
        self._last: dict[str, MetricShare] = {}
        """The last counters of each other frontend, by lease; those that have ended first."""

    async def start(self) -> None:
        """Answer other frontends. Raises BusError."""
        await self._bus.serve(self._subjects.metrics(self._lease), MetricsQuestion, self._on_question)

    def around(self, app: App) -> App:
        """Return the application with /metrics of all frontends."""

        async def with_metrics(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] != METRICS:
                await app(scope, receive, send)
                return
            body = await self.text(by_key=request_here().caller.admin)
            await answer(send, 200, body, [(b"content-type", CONTENT_TYPE)])

        return with_metrics

    async def text(self, *, by_key: bool) -> bytes:
        """Return the metrics of all frontends as Prometheus reads them."""
        others = self._others()
        asked = await asyncio.gather(*(self._ask(lease) for lease in others))
        answers = {lease: told for lease, told in zip(others, asked, strict=True) if told is not None}
        self._note(answers)
        unread = len(others) - len(answers)
        if not unread:
            self._log_once.clear()
        # In a thread: many models have many series, and tokens must not wait for them.
        return await asyncio.to_thread(self._together, self._share(), answers, dict(self._last), unread, by_key)

    def _together(
        self,
        own: MetricShare,
        answers: Mapping[str, MetricsAnswer],
        last: Mapping[str, MetricShare],
        unread: int,
        by_key: bool,
    ) -> bytes:
        number = [Sample(FRONTENDS, (), 1 + len(answers)), Sample(FRONTENDS_UNREAD, (), unread)]
        read = [own, *(each.own for each in answers.values())]
        shares = [*read, *(share for lease, share in last.items() if lease not in answers)]
        shown = together((each.families for each in shares), across_frontends)
        if by_key:
            of_keys = together((each.by_key for each in shares), across_frontends)
            names = {family.name for family in of_keys}
            shown = (*(family for family in shown if family.name not in names), *of_keys)
        return written((*shown, *families(number)))

    def _others(self) -> list[str]:
        return [
            each.lease
            for each in self._fleet.view.members()
            if each.role == FRONTEND_ROLE and each.lease != self._lease and each.state != "starting"
        ]

    def _share(self) -> MetricShare:
        return MetricShare(self._collect(), families(self._by_key()))

    async def _ask(self, lease: str) -> MetricsAnswer | None:
        """Return the metrics of another frontend; None if it does not tell them in time."""
        subject = self._subjects.metrics(lease)
        try:
            return await self._bus.ask(subject, MetricsQuestion(), MetricsAnswer, timeout_s=_ANSWER_WITHIN_S)
        except (BusError, DecodeError) as error:
            self._log_once.warn(f"a frontend does not tell its metrics, its last known counters are shown: {error}")
        return None

    def _note(self, answers: Mapping[str, MetricsAnswer]) -> None:
        """Keep the counters of all others, and what these know of frontends that have ended."""
        living = (self._lease, *answers)
        for told in answers.values():
            self._last = ended_together(self._last, told.ended, living)
        for lease, told in answers.items():
            self._last[lease] = counters(told.own, across_frontends)

    async def _on_question(self, _: MetricsQuestion) -> MetricsAnswer:
        living = {self._lease, *self._others()}
        ended = {lease: share for lease, share in self._last.items() if lease not in living}
        return MetricsAnswer(self._share(), ended)
