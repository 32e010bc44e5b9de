"""The workers of a chaos run: the product's with mockers, forked like those with vLLM."""

from __future__ import annotations

from components import workers
from components.workers.settings import worker_schema
from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.sdk import service

_PRELOAD = "tests.chaos.preload"


@service(
    resources={"gpu": 1},
    config=worker_schema(),
    role="aggregated",
    role_beside={PREFILL_ROLE: "decode"},
    preload=_PRELOAD,
)
class VllmWorker(workers.VllmWorker):
    """A worker that decodes."""


@service(resources={"gpu": 1}, config=worker_schema(), role=PREFILL_ROLE, preload=_PRELOAD)
class PrefillWorker(workers.PrefillWorker):
    """A worker that prefills."""
