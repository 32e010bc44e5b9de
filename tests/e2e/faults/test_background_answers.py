"""Answers in the background outlive the frontend that computes them, and a worker. On real vLLM, seen by `openai`."""

from __future__ import annotations

import os
import signal
from typing import Any

import openai

from tests.e2e.llm_server import LlmServer
from tests.integration.frontend.answer_events import events_after, text_of
from tests.integration.server_process import eventually

TOKENS = 300
SEEN = 30
"""Events that a client has before anything is killed."""

PROMPTS: dict[str, dict[str, Any]] = {
    "story number 0: ": {"temperature": 0},
    "story number 1: ": {"temperature": 1.0, "extra_body": {"seed": 1, "ignore_eos": True}},
}


def ask(client: openai.OpenAI, prompt: str, **more: Any) -> Any:
    """Ask for a story."""
    asked = {"extra_body": {"ignore_eos": True}, **PROMPTS[prompt], **more}
    return client.responses.create(model="random", input=prompt, max_output_tokens=TOKENS, **asked)


def answers(client: openai.OpenAI) -> bool:
    """Whether somebody listens."""
    try:
        client.models.list()
    except openai.APIError:
        return False
    return True


def test_answers_go_on_when_their_frontend_and_a_worker_are_killed(served: LlmServer, client: openai.OpenAI) -> None:
    undisturbed = {prompt: ask(client, prompt).output_text for prompt in PROMPTS}
    names = {prompt: ask(client, prompt, background=True).id for prompt in PROMPTS}
    before = {prompt: events_after(client, name, most=SEEN) for prompt, name in names.items()}
    for victim in ("VllmWorker", "Frontend"):
        os.kill(served.pid(victim), signal.SIGKILL)
    eventually(lambda: answers(client), "a frontend that answers")
    for prompt, name in names.items():
        told = before[prompt] + events_after(client, name, before[prompt][-1].sequence_number)
        assert [event.sequence_number for event in told] == list(range(len(told)))
        assert text_of(told) == undisturbed[prompt]
        assert [event.to_dict() for event in events_after(client, name)] == [event.to_dict() for event in told]
    served.await_workers(2)
