"""Reads requests, TTFT and inter-token latency from a frontend's /metrics, since no presence has them, and computes
rates of counters."""

from __future__ import annotations

import asyncio
import http.client
import logging
from collections import deque
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from dynamo_local.monitor.metrics import HELD, IN_FLIGHT, USAGE_CACHED, USAGE_PROMPT

WINDOW_S = 5.0
"""Time over which rates are means, in seconds. Shorter means change too fast to be read."""

_LEAST_S = 0.9
"""Minimum time between the first and the last reading for a rate, in seconds."""


Counter = tuple[str, str]
"""Owner and name of a counter."""

_log = logging.getLogger(__name__)
_TIMEOUT_S = 4.0
"""A frontend asks the others, and waits for two seconds."""
_MAX_BYTES = 8 * 1024 * 1024
_FINISHED = "vllm:request_success_total"
_TTFT = "vllm:time_to_first_token_seconds"
_ITL = "vllm:inter_token_latency_seconds"
_PROMPT, _CACHED = USAGE_PROMPT.name, USAGE_CACHED.name
_COUNTERS = (_FINISHED, f"{_TTFT}_sum", f"{_TTFT}_count", f"{_ITL}_sum", f"{_ITL}_count", _PROMPT, _CACHED)


class Rates:
    """Readings of counters. Times are CLOCK_MONOTONIC, in seconds, and never decrease."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._readings: dict[Counter, deque[tuple[float, float]]] = {}

    def note(self, counter: Counter, value: float, now: float) -> None:
        """Add a reading. A smaller value than before means that the counter has restarted: older readings go."""
        readings = self._readings.setdefault(counter, deque())
        if readings and value < readings[-1][1]:
            readings.clear()
        readings.append((now, value))
        # One reading older than the window stays: the growth within the window is counted from it.
        while len(readings) > 1 and readings[1][0] <= now - self._window_s:
            readings.popleft()

    def growth(self, counter: Counter, now: float) -> float | None:
        """Return the counter's growth within the window; None without readings over enough time."""
        readings = self._readings.get(counter)
        if not readings or now - readings[0][0] < _LEAST_S:
            return None
        before = [value for at, value in readings if at <= now - self._window_s]
        return readings[-1][1] - (before[-1] if before else readings[0][1])

    def rate(self, counter: Counter, now: float) -> float | None:
        """Return the counter's growth per second; None without readings over enough time."""
        grown = self.growth(counter, now)
        if grown is None:
            return None
        return grown / min(self._window_s, now - self._readings[counter][0][0])

    def forget(self, owner: str) -> None:
        """Forget the counters of one owner."""
        for key in [key for key in self._readings if key[0] == owner]:
            del self._readings[key]


@dataclass(frozen=True)
class FrontendFigures:
    """Means over the last seconds (`rates.WINDOW_S`). None: unknown, or no request in that time."""

    in_flight: int | None = None
    held: int | None = None
    """Requests that wait for a worker to be ready; they are not among `in_flight`."""
    requests_per_s: float | None = None
    """Finished requests per second."""
    ttft_s: float | None = None
    inter_token_s: float | None = None
    cached_share: float | None = None
    """Share of the tokens of prompts that workers found in their caches."""


@dataclass(frozen=True)
class ReadFigures:
    """The figures of all requests, and those of each model, by the name that metrics have for it."""

    whole: FrontendFigures
    models: Mapping[str, FrontendFigures]


class FrontendReader:
    """Reads one frontend repeatedly, and keeps its counters for rates."""

    def __init__(self) -> None:
        self._rates = Rates()

    async def read(self, url: str, now: float) -> ReadFigures | None:
        """Read the frontend at `url`, and return its figures. None: the frontend does not answer."""
        try:
            text = await asyncio.to_thread(_get, url)
            models = await asyncio.to_thread(totals_by_model, text)
        except (OSError, http.client.HTTPException, ValueError) as error:
            _log.debug("no figures from %s: %s", url, error)
            return None
        whole = self._figures(url, _added_up(models), now)
        return ReadFigures(whole, {model: self._figures(f"{url} {model}", one, now) for model, one in models.items()})

    def _figures(self, owner: str, totals: Mapping[str, float], now: float) -> FrontendFigures:
        for counter in _COUNTERS:
            if counter in totals:
                self._rates.note((owner, counter), totals[counter], now)
        in_flight, held = totals.get(IN_FLIGHT.name), totals.get(HELD.name)
        return FrontendFigures(
            in_flight=None if in_flight is None else int(in_flight),
            held=None if held is None else int(held),
            requests_per_s=self._rates.rate((owner, _FINISHED), now),
            ttft_s=self._mean(owner, _TTFT, now),
            inter_token_s=self._mean(owner, _ITL, now),
            cached_share=self._ratio(owner, _CACHED, _PROMPT, now),
        )

    def _mean(self, owner: str, histogram: str, now: float) -> float | None:
        return self._ratio(owner, f"{histogram}_sum", f"{histogram}_count", now)

    def _ratio(self, owner: str, counter: str, of: str, now: float) -> float | None:
        part, whole = self._rates.growth((owner, counter), now), self._rates.growth((owner, of), now)
        return part / whole if part is not None and whole else None


def totals_by_model(text: str) -> dict[str, dict[str, float]]:
    """Return the needed series of a Prometheus text by model, each summed over its other labels.

    Raises ValueError for other text.
    """
    wanted = {*_COUNTERS, IN_FLIGHT.name, HELD.name}
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in wanted:
                # The label is called so in our metrics, and otherwise in vLLM's.
                model = sample.labels.get("model") or sample.labels.get("model_name", "")
                totals = found.setdefault(model, {})
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return found


def _added_up(models: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for totals in models.values():
        for name, value in totals.items():
            found[name] = found.get(name, 0.0) + value
    return found


def _get(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        raise ValueError(f"not an address to read from: {url}")
    with closing(http.client.HTTPConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S)) as connection:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise ValueError(f"status {answer.status}")
        return answer.read(_MAX_BYTES).decode()
