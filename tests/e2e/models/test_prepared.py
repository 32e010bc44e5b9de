"""Workers that are forked with loaded weights answer as those that have loaded them: tokens, logprobs, adapters."""

from __future__ import annotations

import os
import signal
from typing import Any

import httpx
import pytest

from state.machine.processes import start_time
from tests.e2e.conftest import ADAPTERS
from tests.e2e.llm_server import PATIENCE_S, LlmServer, command_of
from tests.integration.server_process import eventually, parent_of

pytest.importorskip("vllm", reason="vLLM is not installed")

WORKERS = ("lora_VllmWorker", "lora_PrefillWorker")
TITLE = "forkserver.prepared.process"


def answers(server: LlmServer, salt: str) -> list[tuple[list[int], list[float], Any]]:
    """Of each model, one after the other, for a prompt that is prefilled where it is decoded."""
    found = []
    for model in ("random", *ADAPTERS):
        body = {
            "model": model, "prompt": "where was it, then?", "max_tokens": 48, "temperature": 0, "ignore_eos": True,
            "cache_salt": salt, "return_token_ids": True, "logprobs": 3,
        }  # fmt: skip
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert reply.status_code == 200, reply.text
        choice = reply.json()["choices"][0]
        logprobs = choice["logprobs"]
        found.append((choice["token_ids"], logprobs["token_logprobs"], logprobs["top_logprobs"]))
    return found


def pids(server: LlmServer) -> list[int]:
    """Of the hosts of both workers."""
    found = [server.state().components[name].pid for name in WORKERS]
    return [pid for pid in found if pid is not None]


def is_forked_with_weights(pid: int) -> bool:
    parent = parent_of(pid)
    return parent is not None and TITLE in command_of(parent)


def test_answers_are_those_of_a_worker_that_has_loaded_the_weights(lora: LlmServer) -> None:
    loaded, before = answers(lora, "loaded"), pids(lora)
    assert not any(map(is_forked_with_weights, before))
    for name in WORKERS:
        path = lora.paths.prepared_socket(name)
        eventually(path.exists, f"nothing has loaded the weights of {name}", PATIENCE_S)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    for pid in before:
        eventually(lambda pid=pid: start_time(pid) is None, f"{pid} lives on", PATIENCE_S)  # type: ignore[misc]
    lora.await_workers(2)
    after = pids(lora)
    assert all(map(is_forked_with_weights, after))
    assert answers(lora, "forked") == loaded
    # One after the other, from pages that both share.
    assert answers(lora, "again") == loaded
