"""Batches on real vLLM: what a line is answered is what a request is answered."""

from __future__ import annotations

import json
from typing import Any

import openai

from tests.e2e.llm_server import PATIENCE_S
from tests.integration.server_process import eventually

MODEL = "random"
PROMPTS = ("once upon a time", "in a hole in the ground", "call me", "it was the best of times")
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "temperature": 0}


def test_lines_are_answered_as_requests_are(client: openai.OpenAI) -> None:
    lines = [
        {"custom_id": prompt, "method": "POST", "url": "/v1/completions", "body": GREEDY | {"prompt": prompt}}
        for prompt in PROMPTS
    ]
    # vLLM refuses what it alone can judge: the result of that line, and of no other.
    lines.append(lines[0] | {"custom_id": "hot", "body": lines[0]["body"] | {"temperature": "hot"}})  # type: ignore[operator]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
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


def _text(client: openai.OpenAI, file_id: str | None) -> str:
    assert file_id is not None
    return client.files.content(file_id).text
