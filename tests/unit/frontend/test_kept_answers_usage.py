"""Answers that are kept count as used once, however many attempts and frontends they take."""

from __future__ import annotations

import pytest

from dynamo_local.core.usage.totals import UsageTotals
from tests.unit.frontend.kept_scene import TEXT, Application, Frontend, Start, at, seen, whole


@pytest.mark.parametrize("stops_at", [0, 4, len(TEXT) - 1])
async def test_what_an_answer_uses_counts_once_however_often_its_frontend_ends(start: Start, stops_at: int) -> None:
    application = Application()
    application.fails = at(stops_at, application)
    first = await start(application)
    answer = await first.begin()
    await seen(first, answer, stops_at)
    await first.close()
    second = await start(Application())
    assert whole(await second.follow(answer))
    await second.close()
    assert used(first, second) == (1, 0, 2, 1, len(TEXT))


@pytest.mark.parametrize("position", [0, 4, len(TEXT) - 1])
async def test_what_an_answer_uses_counts_once_however_many_attempts_it_takes(start: Start, position: int) -> None:
    application = Application()
    application.fail(position, "no worker is ready")
    frontend = await start(application)
    frontend.unready = "no worker is ready"
    answer = await frontend.begin()
    await frontend.show(answer)
    frontend.unready = None
    assert whole(await frontend.follow(answer))
    assert used(frontend) == (1, 0, 2, 1, len(TEXT))


async def test_an_answer_that_is_cancelled_has_failed_and_used_what_it_has(start: Start) -> None:
    application = Application()
    application.fails = at(4, application)
    frontend = await start(application)
    answer = await frontend.begin()
    await seen(frontend, answer, 4)
    await frontend.ask(f"/{answer}/cancel")
    assert used(frontend) == (1, 1, 2, 1, 5)


def used(*frontends: Frontend) -> tuple[int, int, int, int, int]:
    """Requests, those that have failed, and tokens of prompts, cached and of outputs that were counted."""
    totals = UsageTotals()
    for record in [record for frontend in frontends for record in frontend.used]:
        assert min(record.requests, record.prompt, record.cached, record.output) >= 0
        totals.add(record)
    (sums,) = totals.sums.values()
    return sums.requests, sums.failed, sums.prompt, sums.cached, sums.output
