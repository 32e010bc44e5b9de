"""What metrics tell of usage: to administrators what each key has used, to others no name of a key."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from components.frontend.http.gate import Administration, HttpGate
from components.frontend.http.models import ModelEntry, ModelTable
from components.frontend.http.usage import FrontendUsage
from components.frontend.metrics import FrontendMetrics
from dynamo_local.core.fleet.view import FleetView
from dynamo_local.core.http.asgi import Receive, Scope, Send
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from dynamo_local.core.subjects import Subjects
from dynamo_local.core.usage.records import UsageRecord
from dynamo_local.monitor.exposition import collected, expose
from dynamo_local.monitor.metrics import UsageCounts
from state.paths import StatePaths
from tests.unit.frontend.asgi_driver import Answer, call, scope

HOUR = 3600.0


async def nothing(asked: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError(f"{asked['path']} is nobody's")


class Front:
    """A gate whose application shows metrics."""

    def __init__(self, root: Path) -> None:
        self.usage = FrontendUsage(StatePaths(root, "n"), "lease")
        registry = CollectorRegistry()
        expose(self.usage.samples, registry=registry)
        alone = SimpleNamespace(view=FleetView())
        metrics = FrontendMetrics(
            cast("Any", None),
            Subjects("n"),
            "lease",
            cast("Any", alone),
            self.usage.samples_by_key,
            lambda: collected(registry),
        ).around(nothing)
        limits = AdmissionLimits()
        self.gate = HttpGate(
            metrics,
            limits=limits,
            models=ModelTable([ModelEntry(["m"], lambda: None, limits, metrics)]),
            is_draining=lambda: False,
            api_keys=["plain"],
            administration=Administration(["master"]),
            meter=self.usage.meter,
        )

    async def get(self, path: str, key: str = "") -> Answer:
        headers = [("authorization", f"Bearer {key}")] if key else []
        return await call(self.gate, scope(path, "GET", headers))


@pytest.fixture
def front(tmp_path: Path) -> Front:
    front = Front(tmp_path)
    for hour, key in ((1, "team-a"), (1, "team-b"), (30, "team-a")):
        front.usage.meter.write(UsageRecord(hour * HOUR, "m", key, status=200, prompt=7, output=3, seconds=0.5))
    return front


async def test_only_administrators_see_keys_in_metrics(front: Front) -> None:
    for key in ("", "plain", "guess"):
        body = (await front.get("/metrics", key)).body.decode()
        assert 'dynamo_usage_prompt_tokens_total{key="",model="m"} 21.0' in body
        assert "team" not in body
    shown = (await front.get("/metrics", "master")).body.decode()
    assert 'dynamo_usage_prompt_tokens_total{key="team-a",model="m"} 14.0' in shown
    assert 'dynamo_usage_requests_total{key="team-b",model="m",outcome="ok"} 1.0' in shown
    assert 'key="",model' not in shown


def test_series_of_keys_are_bounded() -> None:
    counts = UsageCounts(most_keys=2)
    for number in range(5):
        counts.note(UsageRecord(0, "m", f"key{number}", prompt=1))
    assert {sample.labels[1] for sample in counts.samples(by_key=True)} == {"key0", "key1"}
    assert {sample.value for sample in counts.samples(by_key=False) if "prompt" in sample.metric.name} == {5}
