"""Batches on real vLLM: what a line is answered is what a request is answered."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai

from tests.e2e.llm_server import PATIENCE_S, LlmServer, settled
from tests.integration.server_process import eventually

MODEL = "random"
PROMPTS = ("once upon a time", "in a hole in the ground", "call me", "it was the best of times")
LONG = 4000
"""Tokens that take an engine much longer than a batch takes to be cancelled."""
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "temperature": 0}


def test_lines_are_answered_as_requests_are(client: openai.OpenAI) -> None:
    lines = [
        {"custom_id": prompt, "method": "POST", "url": "/v1/completions", "body": GREEDY | {"prompt": prompt}}
        for prompt in PROMPTS
    ]
    # vLLM refuses what it alone can judge: the result of that line, and of no other.
    lines.append(lines[0] | {"custom_id": "hot", "body": lines[0]["body"] | {"temperature": "hot"}})  # type: ignore[operator]
    batch = _order(client, lines)
    eventually(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch does not end", PATIENCE_S)
    ended = client.batches.retrieve(batch.id)
    found = {line["custom_id"]: line for line in map(json.loads, _text(client, ended.output_file_id).splitlines())}
    for prompt in PROMPTS:
        asked = client.completions.create(prompt=prompt, **GREEDY)
        body = found[prompt]["response"]["body"]
        assert body["choices"][0]["text"] == asked.choices[0].text
        assert body["usage"]["completion_tokens"] == asked.usage.completion_tokens
    (wrong,) = map(json.loads, _text(client, ended.error_file_id).splitlines())
    assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("hot", 400)
    assert "temperature" in wrong["response"]["body"]["error"]["message"]


async def test_lines_of_a_cancelled_batch_end_in_their_engines(
    served: LlmServer, client: openai.OpenAI, http: httpx.Client
) -> None:
    body = GREEDY | {"max_tokens": LONG, "ignore_eos": True}
    batch = _order(
        client,
        [
            {"custom_id": prompt, "method": "POST", "url": "/v1/completions", "body": body | {"prompt": prompt}}
            for prompt in PROMPTS
        ],
    )
    before = _generated(http)
    eventually(lambda: _generated(http) > before, "no line runs", PATIENCE_S)
    client.batches.cancel(batch.id)
    eventually(lambda: client.batches.retrieve(batch.id).status == "cancelled", "the batch does not end", PATIENCE_S)
    await served.until(settled, "lines run on")
    # Left alone, each of them would have so many.
    assert _generated(http) - before < LONG


def _order(client: openai.OpenAI, lines: list[dict[str, Any]]) -> openai.types.Batch:
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


def _generated(http: httpx.Client) -> float:
    """Tokens that the server has generated."""
    shown = http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in shown if line.startswith("vllm:generation_tokens_total{"))


def _text(client: openai.OpenAI, file_id: str | None) -> str:
    assert file_id is not None
    return client.files.content(file_id).text
