"""Services that the graphs beside this module link in different ways."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from dynamo_local.sdk import Service, depends, endpoint, service


@dataclass(frozen=True)
class WorkerConfig:
    max_num_seqs: int = field(default=8, metadata={"help": "requests that run at once"})
    gpu_share: float = 0.9
    model: str = "tiny"
    eager: bool = False
    dtype: Literal["auto", "float32"] = "auto"
    stop: tuple[str, ...] = ()
    revision: str | None = None
    api_key: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


@service(resources={"gpu": 1})
class Prefill(Service):
    @endpoint()
    async def prefill(self, text: str) -> str:
        return text


@service(resources={"gpu": 2, "cpu": "500m"}, workers=2, config=WorkerConfig, role="decode")
class Worker(Service):
    prefill = depends(Prefill)

    @endpoint()
    async def generate(self, text: str) -> AsyncIterator[str]:
        yield text


@dataclass(frozen=True)
class RouterConfig:
    model: str
    block_size: int = 16


@service(config=RouterConfig)
class Router(Service):
    worker = depends(Worker)


@service(namespace="shop")
class Frontend(Service):
    router = depends(Router)
    worker = depends(Worker)
