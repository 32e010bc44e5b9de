"""A graph that is resolved and never started."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_local.sdk import depends, service


@dataclass(frozen=True)
class WorkerSettings:
    model: str = "tiny"
    seed: int = 0
    api_key: str = ""


@service(config=WorkerSettings, resources={"gpu": 1})
class Worker:
    """Does the work."""


@service()
class Front:
    """Takes the requests."""

    worker = depends(Worker)
