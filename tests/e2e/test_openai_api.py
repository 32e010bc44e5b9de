"""What users of the OpenAI API see: answers, streams, options."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from dynamo_local.core.usage.totals import report
from state.usage.totals import read_usage
from tests.e2e.llm_server import LlmServer

MODEL = "random"
HELLO = [{"role": "user", "content": "hello"}]


def answered(http: httpx.Client, path: str, body: dict[str, Any] | bytes) -> dict[str, Any]:
    """What a path answers to a body, which it takes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def complete(client: openai.OpenAI, prompt: str, tokens: int = 12, **options: object) -> str:
    answer = client.completions.create(  # type: ignore[call-overload]
        model=MODEL, prompt=prompt, max_tokens=tokens, temperature=0, **options
    )
    return str(answer.choices[0].text)


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=8, temperature=0
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_one_model_is_told_by_its_name(client: openai.OpenAI) -> None:
    listed = client.models.list().data[0]
    model = client.models.retrieve(MODEL)
    assert (model.id, model.object, model.owned_by) == (listed.id, listed.object, listed.owned_by)
    with pytest.raises(openai.NotFoundError, match="`org/other` does not exist"):
        client.models.retrieve("org/other")


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    whole = complete(client, "once upon a time", 500)
    chunks = list(
        client.completions.create(model=MODEL, prompt="once upon a time", max_tokens=500, temperature=0, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    # On a busy machine tokens are merged into fewer chunks; seconds of them never into one.
    assert len(chunks) > 1
    assert chunks[-1].choices[0].finish_reason == "length"


def test_usage_comes_last_in_a_stream_if_asked_for(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    for position in logprobs.content:
        assert len(position.top_logprobs) == 3
        # Greedy: the token that was taken is the likeliest.
        assert position.logprob == pytest.approx(max(top.logprob for top in position.top_logprobs))
        assert position.logprob <= 0


def test_prompt_logprobs_cover_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="abcdef", max_tokens=1, echo=True, logprobs=1, temperature=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert answer.usage is not None
    assert len(logprobs.token_logprobs) == answer.usage.prompt_tokens + 1
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])


def test_the_whole_vocabulary_where_that_is_set(api: openai.OpenAI) -> None:
    answer = api.completions.create(model=MODEL, prompt="abc", max_tokens=1, logprobs=-1, temperature=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.top_logprobs[0]) > 100


def test_stop_string(client: openai.OpenAI) -> None:
    whole = complete(client, "tell me", 40)
    stop = whole[10:12]
    cut = client.completions.create(model=MODEL, prompt="tell me", max_tokens=40, temperature=0, stop=[stop])
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == whole[: whole.index(stop)]


def test_seed_repeats_a_sample(client: openai.OpenAI) -> None:
    def sample(seed: int) -> str:
        answer = client.completions.create(
            model=MODEL,
            prompt="dice",
            max_tokens=24,
            temperature=1.5,
            seed=seed,
            extra_body={"ignore_eos": True},
        )
        return answer.choices[0].text

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_two_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=24,
        n=2,
        temperature=1.5,
        seed=7,
        extra_body={"ignore_eos": True},
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content


def test_structured_output(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "is it?"}],
        max_tokens=200,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    )
    content = answer.choices[0].message.content
    assert content is not None
    assert json.loads(content)["yes"] in (True, False)


def test_prompts_of_one_request_are_answered_in_order(client: openai.OpenAI) -> None:
    prompts = ["alpha", "beta", "gamma"]
    answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=12, temperature=0)
    assert [choice.text for choice in answer.choices] == [complete(client, prompt) for prompt in prompts]


def test_a_stream_is_neither_kept_nor_collected_on_its_way(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 2, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert (stream.headers["cache-control"], stream.headers["x-accel-buffering"]) == ("no-cache", "no")
        assert stream.read().endswith(b"data: [DONE]\n\n")


def test_several_conversations_in_one_request(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": [HELLO, HELLO], "max_tokens": 4, "temperature": 0}
    choices = answered(http, "/v1/chat/completions/batch", body)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert choices[0]["message"]["content"] == choices[1]["message"]["content"]


def test_scores(http: httpx.Client) -> None:
    body = {"model": MODEL, "query": "is it", "items": [" so", " not"], "label_token_ids": [97, 98]}
    scores = [item["score"] for item in answered(http, "/generative_scoring", body)["data"]]
    swapped = answered(http, "/generative_scoring", body | {"label_token_ids": [98, 97]})["data"]
    assert [first + second["score"] for first, second in zip(scores, swapped, strict=True)] == pytest.approx([1, 1])


def test_what_answers_tell_of_their_use_is_recorded(served: LlmServer, http: httpx.Client) -> None:
    def recorded() -> tuple[int, int]:
        total = report(read_usage(served.paths)).total
        return total.prompt, total.output

    beams = {"use_beam_search": True, "n": 2, "max_tokens": 3, "temperature": 0}
    for path, body in (
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, "n": 2}),
        ("/v1/completions", {"prompt": ["hello", "is it so"], "max_tokens": 4, "stop": ["a", "e"]}),
        ("/v1/completions", {"prompt": "hello", **beams}),
        ("/generative_scoring", {"query": "is it", "items": [" so", " not"], "label_token_ids": [97, 98]}),
    ):
        before = recorded()
        usage = answered(http, path, {"model": MODEL, **body})["usage"]
        told = usage["prompt_tokens"], usage.get("completion_tokens", 0)
        assert tuple(now - then for now, then in zip(recorded(), before, strict=True)) == told, path


def test_invocations_take_what_chat_and_completions_take(http: httpx.Client) -> None:
    more = {"model": MODEL, "max_tokens": 2, "temperature": 0}
    assert answered(http, "/invocations", {"messages": HELLO} | more)["object"] == "chat.completion"
    assert answered(http, "/invocations", {"prompt": "hello"} | more)["object"] == "text_completion"


def test_requests_are_read_as_leniently_as_by_vllm(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": "2", "n": "2", "temperature": 0.5}
    for encoding in ("utf-8", "utf-16", "utf-8-sig"):
        answer = answered(http, "/v1/completions/", json.dumps(body).encode(encoding))
        assert len(answer["choices"]) == 2
    for path in ("/metrics/", "/v1/models/", "/health/"):
        assert http.get(path).status_code == 200


def test_the_load_is_told(http: httpx.Client) -> None:
    assert isinstance(http.get("/load").json()["server_load"], int)


def test_what_is_open_is_described_and_nothing_else(http: httpx.Client) -> None:
    page = http.get("/docs")
    assert page.status_code == 200
    # The page loads nothing from elsewhere.
    assert page.text.count("https://") == page.text.count("https://fastapi.tiangolo.com/img/favicon.png")
    for part in ("/static/swagger-ui-bundle.js", "/static/swagger-ui.css"):
        assert part in page.text
        assert http.get(part).status_code == 200
    paths = http.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/models/{model}", "/generative_scoring", "/tokenize", "/load"} <= paths.keys()
    for path, methods in paths.items():
        for method in methods:
            found = http.request(method.upper(), path, content=b"{" if method == "post" else None)
            # What the path names is not there, but the path is.
            is_missing = found.status_code == 404 and "{" in path and "no such path" not in found.text
            assert found.status_code not in (404, 405) or is_missing, path
    assert not {"/sleep", "/v1/load_lora_adapter", "/scale_elastic_ep", "/v1/systemone"} & paths.keys()
