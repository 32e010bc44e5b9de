"""Options of `vllm serve` about one model's application: each changes what its clients or the log see."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("vllm", reason="vLLM is not installed")

import httpx
from prometheus_client import REGISTRY, generate_latest

from dynamo_local.core.errors import EngineError
from tests.e2e.contract.letter_models import Model

pytestmark = pytest.mark.asyncio(loop_scope="module")

PARSER = """
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser


@ToolParserManager.register_module(["of_my_own"])
class OfMyOwn(Hermes2ProToolParser):
    pass
"""

SERVED: dict[str, Any] = {
    "chat-template": "{{ greeting }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "custom-histogram-buckets": {"request_tokens": [7, 70]},
    "default-chat-template-kwargs": {"greeting": "good day, "},
    "enable-auto-tool-choice": True,
    "enable-force-include-usage": True,
    "enable-log-outputs": True,
    "enable-log-requests": True,
    "enable-per-request-metrics": True,
    "enable-prompt-tokens-details": True,
    "fingerprint-mode": "custom",
    "fingerprint-value": "mine",
    "max-log-len": 2,
    "max-num-queued-reqs": 3,
    "response-role": "bot",
    "stream-interval": 4,
    "tool-call-parser": "of_my_own",
}
MESSAGES = [{"role": "user", "content": "hello"}]
ASKED = {"model": "m", "messages": MESSAGES, "max_tokens": 9, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ask(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    folder = tmp_path_factory.mktemp("private")
    plugin = folder / "plugin.py"
    plugin.write_text(PARSER)
    model = Model("m", "A", folder, **SERVED, **{"tool-parser-plugin": str(plugin)})
    await model.application.start(lambda _: None)
    yield model.client
    await model.close()


async def test_answers_show_what_was_asked_for(ask: httpx.AsyncClient) -> None:
    answer = (await ask.post("/v1/chat/completions", json=ASKED)).json()
    assert answer["system_fingerprint"] == "mine"
    assert answer["choices"][0]["message"]["role"] == "bot"
    # A token for each letter.
    assert answer["usage"]["prompt_tokens"] == len("good day, hello")
    assert answer["usage"]["prompt_tokens_details"] is not None
    assert answer["metrics"] is not None


async def test_tokens_of_a_stream_come_together_and_its_usage_unasked(ask: httpx.AsyncClient) -> None:
    text = (await ask.post("/v1/chat/completions", json={**ASKED, "stream": True})).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    pieces = [choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"]]
    # The first one at once.
    assert [piece for piece in pieces if piece] == ["A", "AAAA", "AAAA"]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")][-1:] == [9]


async def test_what_is_too_much_at_once_is_refused(ask: httpx.AsyncClient) -> None:
    statuses = [(await ask.post("/v1/chat/completions", json={**ASKED, "n": n})).status_code for n in (3, 4)]
    assert statuses == [200, 503]


async def test_the_log_has_requests_and_the_beginning_of_answers(
    ask: httpx.AsyncClient, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of vLLM's messages of this level, only these are wanted."""
    written: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: written.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("vllm")
    log.addHandler(handler)
    try:
        await ask.post("/v1/chat/completions", json=ASKED)
        logging.getLogger("vllm.of_others").info("of others")
    finally:
        log.removeHandler(handler)
    assert [line for line in written if line.startswith("Received request chatcmpl-")]
    assert [line for line in written if "output: 'AA', finish_reason: length" in line]
    assert "of others" not in written
    assert all(shown.level <= logging.INFO for shown in log.handlers)


async def test_histograms_have_the_buckets_that_were_given(ask: httpx.AsyncClient) -> None:
    await ask.post("/v1/chat/completions", json=ASKED)
    lines = [line for line in generate_latest(REGISTRY).decode().splitlines() if 'model_name="m"' in line]
    found = [line for line in lines if line.startswith("vllm:request_prompt_tokens_bucket")]
    assert [line.partition('le="')[2].partition('"')[0] for line in found] == ["7.0", "70.0", "+Inf"]


@pytest.mark.parametrize("text", [None, "def", "import nothing_like_it"])
async def test_a_parser_that_cannot_be_imported_is_an_error_of_the_start(tmp_path: Path, text: str | None) -> None:
    plugin = tmp_path / "plugin.py"
    if text is not None:
        plugin.write_text(text)
    model = Model("m", "A", tmp_path, **{"tool-parser-plugin": str(plugin)})
    with pytest.raises(EngineError, match=f"the parsers in {plugin} cannot be imported"):
        await asyncio.wait_for(model.application.start(lambda _: None), 60)
