"""What users of the OpenAI API see: answers, streams, options."""

from __future__ import annotations

import json

import openai
import pytest

MODEL = "quickstart"


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
