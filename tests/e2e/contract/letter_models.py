"""Applications of vLLM's, in the process, whose workers answer with one letter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import httpx

from components.frontend.request_context import request_here
from dynamo_local.core.messages.work import TokenDelta
from dynamo_local.core.ports import Outputs, Request
from dynamo_local.engine.vllm.frontend.application import ModelApplication
from dynamo_local.model.named.random_model import random_model


class Letter:
    """A dispatcher whose workers say one letter, again and again, a token each time the event loop is free."""

    def __init__(self, letter: str) -> None:
        self._token = ord(letter)
        self._outputs: asyncio.Queue[Outputs] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self.adapters: list[str | None] = []

    async def submit(self, request: Request) -> None:
        request_here().submit(lambda: self._begin(request))

    def _begin(self, request: Request) -> None:
        self.adapters.append(request.adapter)
        task = asyncio.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: Request) -> None:
        assert request.max_tokens is not None
        for position in range(request.max_tokens):
            end: Any = "length" if position + 1 == request.max_tokens else None
            delta = TokenDelta(request.request_id, 1, position, [self._token], finish=end)
            self._outputs.put_nowait(Outputs(time.monotonic(), (delta,)))
            await asyncio.sleep(0)

    async def cancel(self, request_ids: Collection[str]) -> None:
        return

    async def outputs(self) -> Outputs:
        return await self._outputs.get()


class Model:
    """An application with its dispatcher, and a client."""

    def __init__(self, name: str, letter: str, folder: Path, **config: Any) -> None:
        self.name, self.letter = name, letter
        self.dispatcher = Letter(letter)
        given = {"model": str(random_model()), "max-model-len": 2048, "served-model-name": [name], **config}
        self.application = ModelApplication(given, folder, self.dispatcher)
        transport = httpx.ASGITransport(app=self.application)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60)

    async def says(self, tokens: int = 3, model: str | None = None) -> str:
        body = {"model": model or self.name, "prompt": "x", "max_tokens": tokens, "ignore_eos": True}
        answer = await self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    async def close(self) -> None:
        await self.client.aclose()
        await self.application.close()
