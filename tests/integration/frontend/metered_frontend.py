"""A frontend that meters and writes, as a process: `python -m tests.integration.frontend.metered_frontend LEASE`.

Its gate is the real one. In the place of engines there is one that gives each request of a prompt of N tokens N tokens
of output. Standard output has a line for each answer that a client has got: the tokens that it was told.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from components.frontend.http.gate import HttpGate
from components.frontend.http.models import ModelEntry, ModelTable
from components.frontend.http.usage import FrontendUsage
from components.frontend.request_context import request_here
from dynamo_local.core.http.asgi import Event, Receive, Scope, Send
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from state.paths import StatePaths


async def application(asked: Scope, receive: Receive, send: Send) -> None:
    """Answer with a stream that tells what was used before it ends."""
    tokens = len(json.loads((await receive())["body"])["prompt"])
    tally = request_here().tally
    assert tally is not None
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    tally.begin()
    for _ in range(tokens):
        await asyncio.sleep(0)
        tally.add("only", tokens, 0, 1)
        if tally.output == tokens:
            tally.end()
        await send({"type": "http.response.body", "body": b"data: token\n\n", "more_body": True})
    usage = {"usage": {"prompt_tokens": tally.prompt, "completion_tokens": tally.output}}
    await send({"type": "http.response.body", "body": json.dumps(usage).encode(), "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def client(gate: HttpGate, number: int) -> None:
    """Ask again and again, for ever."""
    tokens = 1 + number % 7
    while True:
        parts: list[Event] = [{"type": "http.request", "body": json.dumps({"prompt": [1] * tokens}).encode()}]

        async def receive(parts: list[Event] = parts) -> Event:
            return parts.pop() if parts else await asyncio.Future[Event]()

        async def send(event: Event) -> None:
            if b"usage" in event.get("body", b""):
                told: dict[str, Any] = json.loads(event["body"])["usage"]
                line = f"{told['prompt_tokens'] + told['completion_tokens']}\n"
                # At once, as into a socket: what was written is the client's, whoever is killed now.
                os.write(sys.stdout.fileno(), line.encode())

        path = "/v1/completions"
        asked = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "root_path": ""}
        await gate(asked, receive, send)
        await asyncio.sleep(0)


async def main(lease: str) -> None:
    usage = FrontendUsage(StatePaths.of("metered", os.environ), lease)
    limits = AdmissionLimits()
    models = ModelTable([ModelEntry(["m"], lambda: None, limits, application)])
    gate = HttpGate(application, limits=limits, models=models, is_draining=lambda: False, meter=usage.meter)
    await asyncio.gather(*(client(gate, number) for number in range(8)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
