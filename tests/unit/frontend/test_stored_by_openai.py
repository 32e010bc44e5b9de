"""What is kept for clients, as the classes of OpenAI's own client read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import openai

from tests.unit.frontend import test_batches
from tests.unit.frontend.kept_scene import TEXT, Application, Start


def client_of(gate: Any) -> openai.AsyncOpenAI:
    transport = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=gate))
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="alice", http_client=transport, max_retries=0)


async def test_answers_and_what_they_were_computed_from(start: Start) -> None:
    frontend = await start(Application())
    async with client_of(frontend.gate) as client:
        first = await client.responses.create(model="m", input="one", store=True)
        second = await client.responses.create(model="m", input="two", previous_response_id=first.id)
        assert second.previous_response_id == first.id
        listed = client.responses.input_items.list(second.id, order="asc", limit=1)
        items = [item async for item in listed]
        assert [item.type for item in items] == ["message"] * 3
        newest = await client.responses.input_items.list(second.id, limit=1)
        assert newest.data == items[:1:-1]
        streamed = await client.responses.retrieve(second.id, stream=True)
        events = [event async for event in streamed]
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
        await client.responses.delete(second.id)


async def test_a_batch_with_its_counts_and_its_usage(tmp_path: Path) -> None:
    frontend = test_batches.Frontend(tmp_path, test_batches.Model())
    name = await frontend.order(*test_batches.lines(5))
    async with frontend.running(), client_of(frontend.gate) as client:
        await frontend.until(name, "completed")
        batch = await client.batches.retrieve(name)
        listed = [each async for each in client.batches.list(limit=1)]
        assert listed == [batch]
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 5
        assert batch.usage is not None
        assert batch.usage.total_tokens == 5 * sum(test_batches.USAGE.values())
        assert batch.usage.input_tokens_details.cached_tokens == 0
        content = await client.files.content(str(batch.output_file_id))
        assert len(content.text.splitlines()) == 5
