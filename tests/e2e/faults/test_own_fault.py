"""What is a request's own fault: refused at once with its cause, tried once, and of no consequence to anybody else."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import LIST_ROUTES
from tests.e2e.llm_server import LlmServer

MODEL = "random"

SCHEMA = {
    "type": "object",
    "properties": {"letters": {"type": "string", "pattern": "(a|b|c){1,300}"}},
    "required": ["letters"],
}
"""vLLM's server lets it pass; what compiles grammars in its engines does not."""

NOT_COMPILED = "the grammar of the structured output cannot be compiled: .*Check failed"


def ask(client: openai.OpenAI, *, stream: bool, **options: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=20,
        stream=stream,  # type: ignore[call-overload]
        response_format={"type": "json_schema", "json_schema": {"name": "letters", "schema": SCHEMA}},
        **options,
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_cannot_be_compiled_is_a_bad_request(
    client: openai.OpenAI, served: LlmServer, stream: bool
) -> None:
    request = f"letters-{stream}"
    with pytest.raises(openai.BadRequestError, match=NOT_COMPILED) as refused:
        ask(client, stream=stream, extra_headers={"X-Request-Id": request})
    assert isinstance(refused.value.body, dict)
    assert (refused.value.body["type"], refused.value.body["code"]) == ("BadRequestError", 400)
    query = {"limit": "100", "request": f"chatcmpl-{request}"}
    assert len(ControlClient(served.paths).do(LIST_ROUTES, query=query)["routes"]) == 1


def test_others_are_answered_meanwhile_and_afterwards(client: openai.OpenAI) -> None:
    def good(number: int) -> str:
        answer = client.completions.create(model=MODEL, prompt=f"{number}", max_tokens=40, temperature=0)
        return answer.choices[0].text

    expected = [good(number) for number in range(4)]
    with ThreadPoolExecutor(6) as pool:
        answers = pool.map(good, range(4))
        # As many as open a breaker.
        bad = [pool.submit(ask, client, stream=number % 2 == 0) for number in range(12)]
        assert list(answers) == expected
        for future in bad:
            assert isinstance(future.exception(), openai.BadRequestError)
    assert [good(number) for number in range(4)] == expected


def token_of(http: httpx.Client, letter: str) -> int:
    answer = http.post("/tokenize", json={"model": MODEL, "prompt": letter, "add_special_tokens": False})
    (token,) = answer.json()["tokens"]
    return int(token)


@pytest.mark.parametrize(("choice", "sent"), [("ba", ""), ("ab", "a")])
def test_a_sampler_that_is_left_no_token_is_a_bad_request(http: httpx.Client, choice: str, sent: str) -> None:
    """Before the first token as an HTTP error, after it as an error in the stream."""
    body = {
        "model": MODEL,
        "prompt": "hello",
        "max_tokens": 8,
        "structured_outputs": {"choice": [choice]},
        "allowed_token_ids": [token_of(http, "a")],
        "stream": True,
    }
    answer = http.post("/v1/completions", json=body)
    if not sent:
        assert answer.status_code == 400
        error = answer.json()["error"]
    else:
        assert answer.status_code == 200
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == sent
        error = chunks[-1]["error"]
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    assert "allowed_token_ids" in error["message"]
