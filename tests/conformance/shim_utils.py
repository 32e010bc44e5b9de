"""Replaces vLLM's `tests/utils.py`: every test gets the one running server."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

import anthropic
import openai
import pytest

P = ParamSpec("P")
R = TypeVar("R")

VLLM_PATH = Path(__file__).parent.parent
ROCM_EXTRA_ARGS: list[str] = []
ROCM_ENV_OVERRIDES: dict[str, str] = {}
BASE_TEST_ENV: dict[str, str] = {}
PATIENCE_S = 60.0


class RemoteOpenAIServer:
    """The running server. The settings with which a test would start a server are ignored."""

    DUMMY_API_KEY = "none"
    uds = None
    show_hidden_metrics = False

    def __init__(self, model: str, vllm_serve_args: object = (), **_: object) -> None:
        parts = urllib.parse.urlsplit(os.environ["CONFORMANCE_BASE_URL"])
        self.host, self.port = parts.hostname, parts.port
        self.model = model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *parts])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), **self._options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **self._options(options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url_root, **self._options(options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url_root, **self._options(options))

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": PATIENCE_S, **options}


RemoteAnthropicServer = RemoteVLLMServer = RemoteLaunchRenderServer = RemoteOpenAIServerCustom = RemoteOpenAIServer


def multi_gpu_only(**_: object) -> pytest.MarkDecorator:
    return pytest.mark.skip(reason="several GPUs")


def requires_fp8(function: Callable[P, R]) -> Callable[P, R]:
    skipped: Callable[P, R] = pytest.mark.skip(reason="fp8")(function)
    return skipped


def create_new_process_for_each_test(*_: object, **__: object) -> Callable[[Callable[P, R]], Callable[P, R]]:
    return lambda function: function
