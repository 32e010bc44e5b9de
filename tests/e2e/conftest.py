"""Servers with real vLLM, each for all tests of a run that ask for it: an engine costs many seconds of CPU to start.

A fixture that starts a server or engines depends on `turn` and is named in SERVERS.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from pathlib import Path

import httpx
import openai
import pytest

from dynamo_local.process.forkserver.protocol import IMPORTED_ENV
from tests.e2e.llm_server import GIVEN, PATIENCE_S, LlmServer
from tests.e2e.models.adapters import RANK, make_adapter
from tests.e2e.tiny_models import make_another
from tests.imported import importing
from tests.integration.server_process import eventually

KEY = "test-key"
ORIGIN = "https://app.example"
"""Of the only pages that browsers let in."""

ADAPTERS = ("pirate", "robot")
REMOTE_FROM = 64
"""Prompts of more tokens are prefilled by the prefill worker, where there is one."""

NO_SERVER = "none"

SERVERS = {
    NO_SERVER: 93,
    "served": 117,
    "pair": 73,
    "disagg": 60,
    "lora": 46,
    "endpoints": 91,
    "monitored": 13,
    "ranks": 40,
    "engines": 246,
    "far_pair": 60,
    "real": 60,
    "real_float32": 60,
    "own_servers": 60,
}
"""Fixtures with servers or engines, in the order in which they have the machine: it may be too small for two. Beside
each, about how many seconds its everyday tests take (`scripts.timings`)."""

IMPORTING = ("served", "engines", "far_pair")
"""Those of SERVERS whose processes import vLLM themselves, or are forks of the test's own."""


@pytest.fixture(scope="session")
def imported() -> Iterator[None]:
    """A process that has imported vLLM, of which fork servers are forks: the test run's, or one of these tests' own."""
    if IMPORTED_ENV in os.environ:
        yield
        return
    with importing(GIVEN) as socket, pytest.MonkeyPatch.context() as patch:
        eventually(socket.exists, "vLLM is imported for ever", PATIENCE_S)
        patch.setenv(IMPORTED_ENV, str(socket))
        yield


@pytest.fixture(scope="session")
def turn(request: pytest.FixtureRequest) -> str:
    """The one of SERVERS that has the machine. When the next one is asked for, pytest ends what depends on this one."""
    name: str = request.param
    if name not in IMPORTING:
        request.getfixturevalue("imported")
    return name


@pytest.fixture(scope="session")
def own_servers(turn: str) -> None:
    """For tests that start and end servers of their own."""


@pytest.fixture(scope="session")
def served(turn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmServer]:
    """`agg_router` with two workers, an API key, its own limits, and pages of one origin let in. Its end is a test."""
    root = tmp_path_factory.mktemp("state")
    keys = root / "keys"
    keys.write_text(f"{KEY}\n")
    options = [
        "examples.llm.graphs.agg_router:Frontend",
        "--file=examples/llm/configs/agg_router.yaml",
        "--model=random",
        f"--Frontend.api-key-file={keys}",
        "--Frontend.max-requests=24",
        "--Frontend.max-body-bytes=200000",
        "--Frontend.max-n=18",
        f"--Frontend.allowed-origins=[{ORIGIN}]",
        "--Frontend.enable-request-id-headers=true",
        "--VllmWorker.dtype=float32",
        # A drain is over when the streams are; on a busy machine they take long.
        f"--drain-timeout={PATIENCE_S}",
        f"--Frontend.drain-timeout-s={PATIENCE_S}",
        f"--VllmWorker.drain-timeout-s={PATIENCE_S}",
    ]
    # Its fork server is killed, and more (scaling/test_forkserver.py).
    with LlmServer(root / "state", "e2e", options, imports=True) as server:
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
def pair(turn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmServer]:
    """Two workers that lend each other KV. Their end is a test of its own."""
    options = [
        "examples.llm.graphs.agg_router:Frontend",
        "--file=examples/llm/configs/agg_router.yaml",
        "--model=random",
        "--VllmWorker.dtype=float32",
        "--VllmWorker.kv-transfer=true",
        "--VllmWorker.max-model-len=8192",
        "--Frontend.max-model-len=8192",
        "--Frontend.enable-auto-tool-choice=true",
        "--Frontend.tool-call-parser=hermes",
        "--Frontend.max-logprobs=-1",
        "--Frontend.enable-prompt-tokens-details=true",
        f"--drain-timeout={PATIENCE_S}",
        f"--Frontend.drain-timeout-s={PATIENCE_S}",
        f"--VllmWorker.drain-timeout-s={PATIENCE_S}",
    ]
    with LlmServer(tmp_path_factory.mktemp("pair") / "state", "pair", options) as server:
        server.await_ready()
        server.await_workers(2)
        yield server


@pytest.fixture(scope="session")
def ranks(turn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmServer]:
    """Two workers that lend each other KV, of two ranks each, on four CPU slots. The frontend is told so, too."""
    options = [
        "examples.llm.graphs.agg_router:Frontend",
        "--file=examples/llm/configs/agg_router.yaml",
        "--model=random",
        "--cpu-slots=4",
        "--Frontend.common-configs=[model, max-model-len, tensor-parallel-size]",
        "--VllmWorker.common-configs=[model, max-model-len, tensor-parallel-size]",
        "--Common.tensor-parallel-size=2",
        "--VllmWorker.dtype=float32",
        f"--drain-timeout={PATIENCE_S}",
        f"--VllmWorker.drain-timeout-s={PATIENCE_S}",
    ]
    with LlmServer(tmp_path_factory.mktemp("ranks") / "state", "ranks", options) as server:
        server.await_ready()
        server.await_workers(2)
        yield server


@pytest.fixture(scope="session")
def api(pair: LlmServer) -> Iterator[openai.OpenAI]:
    """A client of the pair."""
    with openai.OpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="session")
def lora(turn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmServer]:
    """One worker in each role, with two adapters. Its end, by force, is a test of its own."""
    root = tmp_path_factory.mktemp("lora")
    named = [f"{name}={make_adapter(root / name, seed)}" for seed, name in enumerate(ADAPTERS)]
    options = [
        "examples.llm.graphs.disagg:Frontend",
        "--file=examples/llm/configs/disagg.yaml",
        "--model=random",
        "--Common.enable-lora=true",
        f"--Common.lora-modules=[{', '.join(named)}]",
        f"--Common.max-lora-rank={RANK}",
        f"--Frontend.max-local-prefill-length={REMOTE_FROM}",
        f"--drain-timeout={PATIENCE_S}",
    ]
    with LlmServer(root / "state", "lora", options) as server:
        server.await_ready()
        server.await_workers(2)
        yield server


@pytest.fixture(scope="session")
def endpoints(turn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmServer]:
    """No model of its own, and three endpoints with one worker each. Its end is a test."""
    root = tmp_path_factory.mktemp("endpoints")
    story = make_another(root / "story")
    args = {"dtype": "float32", "max-model-len": 2048, "kv-cache-memory-bytes": 128 * 2**20}
    specs = [
        {"name": "chat", "model": "random", "args": args},
        {"name": "story", "model": str(story), "args": args},
        {"name": "embed", "model": "random", "args": {**args, "runner": "pooling", "convert": "embed"}},
    ]
    file = root / "models.yaml"
    # JSON is YAML.
    file.write_text(json.dumps({"endpoints": specs}))
    # Slots for one worker more: an update starts the new worker before the old one ends.
    options = [f"--file={file}", "--cpu-slots=4", f"--drain-timeout={PATIENCE_S}"]
    with LlmServer(root / "state", "endpoints", options) as server:
        server.await_ready()
        for spec in specs:
            server.command("wait", str(spec["name"]))
        yield server


@pytest.fixture(scope="session")
def unpatched() -> BaseContext:
    """Makes processes that have imported vLLM, in which nothing of it is replaced: forks of one that is like that."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["vllm.engine.arg_utils", "vllm.v1.worker.cpu_worker"])
    return context


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A parameter of session scope is what makes pytest end a fixture of that scope before the session's end."""
    if "turn" in metafunc.fixturenames:
        servers = [name for name in SERVERS if name in metafunc.fixturenames]
        if len(servers) != 1:
            raise pytest.UsageError(f"{metafunc.function.__qualname__} uses {servers}: use one of {[*SERVERS]}")
        metafunc.parametrize("turn", servers, ids=[pytest.HIDDEN_PARAM], indirect=True, scope="session")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--side", metavar="K/N", help="of end-to-end tests, run those of the K-th of N groups of servers, beside others"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is here. It comes last, and tests of one server together, those that end it behind the others."""
    here = Path(__file__).parent
    mine = {item: _turn(item) for item in items if item.path.is_relative_to(here)}
    for item in mine:
        item.add_marker(pytest.mark.e2e)
    if (side := config.getoption("--side", None)) is not None:
        number, _, of = side.partition("/")
        chosen = _sides(set(mine.values()), int(of))[int(number) - 1]
        config.hook.pytest_deselected(items=[item for item in items if item in mine and mine[item] not in chosen])
        items[:] = [item for item in items if item not in mine or mine[item] in chosen]
    order = list(SERVERS)
    items.sort(
        key=lambda item: (
            item in mine,
            order.index(mine[item]) if item in mine else 0,
            item.get_closest_marker("ends_server") is not None,
        )
    )


def _sides(turns: set[str], number: int) -> list[set[str]]:
    """Servers in groups that take about the same time: each server, the longest first, goes to the shortest group."""
    found: list[set[str]] = [set() for _ in range(number)]
    for turn in sorted(turns, key=lambda turn: (-SERVERS[turn], turn)):
        min(found, key=lambda side: sum(SERVERS[one] for one in side)).add(turn)
    return found


def _turn(item: pytest.Item) -> str:
    """The one of SERVERS that a test uses."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return str(parameters.get("turn", NO_SERVER))
