"""One graph with real vLLM for all tests of a run: an engine costs many seconds of CPU to start."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.llm_server import PATIENCE_S, LlmServer

KEY = "test-key"

_LAST = (
    "test_zz_shutdown.py",
    "test_prefix_pull.py",
    "test_disagg.py",
    "test_lora.py",
    "test_monitoring.py",
    "test_fidelity.py",
    "test_migration.py",
    "test_planner.py",
)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmServer]:
    """`agg_router` with two workers, an API key and small limits. Its end is a test of its own, run last."""
    root = tmp_path_factory.mktemp("state")
    keys = root / "keys"
    keys.write_text(f"{KEY}\n")
    options = [
        "examples.llm.graphs.agg_router:Frontend",
        "--file=examples/llm/configs/agg_router.yaml",
        f"--Frontend.api-key-file={keys}",
        "--Frontend.max-requests=24",
        "--Frontend.max-body-bytes=200000",
        "--VllmWorker.dtype=float32",
        # A drain is over when the streams are; on a busy machine they take long.
        f"--drain-timeout={PATIENCE_S}",
        f"--Frontend.drain-timeout-s={PATIENCE_S}",
        f"--VllmWorker.drain-timeout-s={PATIENCE_S}",
    ]
    with LlmServer(root / "state", "e2e", options) as server:
        server.await_ready()
        yield server
        if server.process.poll() is None:
            server.signal(signal.SIGTERM)
            server.end(PATIENCE_S)


@pytest.fixture(scope="session")
def client(served: LlmServer) -> Iterator[openai.OpenAI]:
    """The `openai` client as users have it, but without its own retries."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="session")
def http(served: LlmServer) -> Iterator[httpx.Client]:
    """Plain HTTP, with the key."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=served.url, headers=headers, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmServer]:
    """Two workers that lend each other KV. Their end is a test of its own, the last one of test_migration.py."""
    options = [
        "examples.llm.graphs.agg_router:Frontend",
        "--file=examples/llm/configs/agg_router.yaml",
        "--VllmWorker.dtype=float32",
        "--VllmWorker.kv-transfer=true",
        "--VllmWorker.max-model-len=8192",
        "--Frontend.max-model-len=8192",
        "--Frontend.enable-auto-tool-choice=true",
        "--Frontend.tool-call-parser=hermes",
        f"--drain-timeout={PATIENCE_S}",
        f"--Frontend.drain-timeout-s={PATIENCE_S}",
        f"--VllmWorker.drain-timeout-s={PATIENCE_S}",
    ]
    with LlmServer(tmp_path_factory.mktemp("pair") / "state", "pair", options) as server:
        server.await_ready()
        server.await_workers(2)
        yield server


@pytest.fixture(scope="session")
def api(pair: LlmServer) -> Iterator[openai.OpenAI]:
    """A client of the pair."""
    with openai.OpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is here. The shared graph's tests come first, then those of its end, then those with engines of their
    own: the machine may be too small for both at once."""
    here = Path(__file__).parent
    mine = {item for item in items if item.path.is_relative_to(here)}
    for item in mine:
        item.add_marker(pytest.mark.e2e)
    turns = {name: turn for turn, name in enumerate(_LAST, 1)}
    items.sort(key=lambda item: (item in mine, turns.get(item.path.name, 0)))
