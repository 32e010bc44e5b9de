"""The clients: the environment of each, and the programs of docs/guides/clients.md that it runs."""

from __future__ import annotations

from dataclasses import dataclass

AS_OF = "2026-11-22T00:00:00Z"
"""Packages published later are not installed, so that the dependencies of pinned packages do not change."""


@dataclass(frozen=True)
class PythonPackages:
    """An environment of Python. The first requirement is the client."""

    requirements: tuple[str, ...]
    borrowed: tuple[str, ...] = ()
    """Large packages that are taken from this project's environment instead of being installed."""


@dataclass(frozen=True)
class NodePackages:
    """An environment of Node. The first package, as NAME@VERSION, is the client."""

    packages: tuple[str, ...]


@dataclass(frozen=True)
class OwnEnvironment:
    """The environment of this project, for clients that come with vLLM. `package`: the client."""

    package: str


@dataclass(frozen=True)
class Client:
    """A client, and files of docs/guides/clients.md: `programs` run one after the other, `files` lie beside."""

    name: str
    environment: PythonPackages | NodePackages | OwnEnvironment
    programs: tuple[str, ...]
    does: str
    files: tuple[str, ...] = ()
    behind_nginx: bool = False


CLIENTS = (
    Client(
        "openai",
        PythonPackages(("openai==3.54.0",)),
        ("use_openai.py", "think_openai.py"),
        "chat, streams, parsed output, tools, reasoning with a JSON schema, responses, completions, errors",
    ),
    Client(
        "openai-node",
        NodePackages(("openai@6.49.0",)),
        ("use_openai.mjs",),
        "chat, stream, a named tool, errors",
    ),
    Client(
        "anthropic",
        PythonPackages(("anthropic==2.12.0",)),
        ("use_anthropic.py",),
        "messages, stream, token counts, a named tool, thinking, errors",
    ),
    Client(
        "litellm",
        PythonPackages(("litellm[mcp]==1.106.2",)),
        ("use_litellm.py",),
        "completion, stream, JSON schema, tools, errors",
    ),
    Client(
        "langchain",
        PythonPackages(("langchain-openai==1.7.3",)),
        ("use_langchain.py",),
        "invoke, stream with usage, structured output, tools, errors",
    ),
    Client(
        "instructor",
        PythonPackages(("instructor==1.17.0",)),
        ("use_instructor.py",),
        "a model by tools and by JSON schema",
    ),
    Client(
        "pydantic-ai",
        PythonPackages(("pydantic-ai-slim[openai]==2.68.0",)),
        ("use_pydantic_ai.py",),
        "text, stream, a model by tools and by JSON schema, errors",
    ),
    Client(
        "openai-agents",
        PythonPackages(("openai-agents==0.24.0",)),
        ("use_agents.py",),
        "streamed run, a tool and the turn after it",
    ),
    Client(
        "ai-sdk",
        NodePackages(("ai@6.0.326", "@ai-sdk/openai-compatible@2.0.91", "zod@4.6.7")),
        ("use_ai_sdk.mjs",),
        "text, stream with usage, object, tools, errors",
    ),
    Client(
        "lm-eval",
        PythonPackages(("lm-eval[api]==0.4.13", "transformers==5.23.0")),
        ("use_lm_eval.sh",),
        "multiple choice by log-likelihood",
        files=("tasks/pets.yaml", "tasks/pets.jsonl"),
    ),
    Client(
        "guidellm",
        PythonPackages(("guidellm==0.8.1",), borrowed=("torch",)),
        ("use_guidellm.sh",),
        "20 requests, 4 at a time",
    ),
    Client(
        "vllm-bench-serve",
        OwnEnvironment("vllm"),
        ("use_vllm_bench.sh",),
        "20 requests, 4 at a time",
        files=("vllm_bench_serve.py",),
    ),
    Client(
        "nginx",
        PythonPackages(("openai==3.54.0",)),
        ("through_nginx.py",),
        "nginx with its defaults before the server: stream, errors",
        files=("nginx.conf",),
        behind_nginx=True,
    ),
)
