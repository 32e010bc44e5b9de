"""Models of all kinds that vLLM runs on a CPU, served with `kv-transfer` on: they start, go on when their worker dies,
and move to another one with their KV, or say why not.

`make families` runs them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.e2e.llm_server import PATIENCE_S, LlmServer
from tests.e2e.streams import migrate, requests
from tests.e2e.tiny_models import FAMILIES, make_model

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch

WORKERS = ("families_VllmWorker", "families_VllmWorker_1")
TOKENS = 300

SERVED = [name for name, family in FAMILIES.items() if family.fails is None]


pytestmark = pytest.mark.families


@pytest.fixture(params=SERVED)
def name(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if name == "latent attention" and " amx_tile " in Path("/proc/cpuinfo").read_text():
        pytest.skip("on a CPU with AMX, vLLM has latent attention in bfloat16 alone, in which rows are not comparable")
    return name


@pytest.fixture
def server(own_servers: None, name: str, tmp_path: Path) -> Iterator[LlmServer]:
    model = make_model(FAMILIES[name], tmp_path / "model")
    options = [
        "examples.llm.graphs.agg_router:Frontend",
        "--file=examples/llm/configs/agg_router.yaml",
        f"--model={model}",
        "--Common.max-model-len=1024",
        *(f"--VllmWorker.{option}" for option in FAMILIES[name].options),
        f"--drain-timeout={PATIENCE_S}",
    ]
    with LlmServer(tmp_path / "state", "families", options) as server:
        server.await_ready()
        server.await_workers(2)
        yield server
        server.signal(signal.SIGTERM)
        assert server.end(PATIENCE_S) == 0


class Teller:
    """Greedy answers to one prompt, taken as they come."""

    def __init__(self, client: openai.OpenAI) -> None:
        self._client = client
        (self._model,) = [model.id for model in client.models.list()]

    def tell(self, begun: threading.Event) -> list[int]:
        tokens: list[int] = []
        prompt = [number * 7 % 256 for number in range(150)]
        extra = {"ignore_eos": True, "return_token_ids": True}
        with self._client.completions.create(
            model=self._model, prompt=prompt, max_tokens=TOKENS, temperature=0, stream=True, extra_body=extra
        ) as stream:
            for chunk in stream:
                tokens += chunk.choices[0].token_ids or []  # type: ignore[attr-defined]
                if len(tokens) > 8:
                    begun.set()
        return tokens

    def begin(self, pool: ThreadPoolExecutor) -> Future[list[int]]:
        begun = threading.Event()
        telling = pool.submit(self.tell, begun)
        assert begun.wait(PATIENCE_S)
        return telling


def test_a_model_serves_survives_its_worker_and_moves_or_says_why_not(server: LlmServer, name: str) -> None:
    family = FAMILIES[name]
    why = [row["no_transfer"] for row in server.ps() if row["watcher"] in WORKERS]
    assert [reason is None for reason in why] == [family.lends] * 2, why

    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        teller = Teller(client)
        alone = teller.tell(threading.Event())
        assert len(alone) == TOKENS

        killed = teller.begin(pool)
        (before,) = requests(server)
        os.kill(server.pid(before["worker"].removeprefix("families_")), signal.SIGKILL)
        answers = [killed.result()]
        server.await_workers(2)

        moved = teller.begin(pool)
        (before,) = requests(server)
        (result,) = migrate(server, before["worker"])
        answers.append(moved.result())
    assert [len(answer) for answer in answers] == [TOKENS] * 2
    assert answers == [alone] * 2 or not family.exact
    assert (result["outcome"] == "migrated") is family.lends, result
    assert result["why"] or family.lends
    assert_said_once(server, why)


def assert_said_once(server: LlmServer, why: list[str | None]) -> None:
    """In the logs, each time that one of the workers has started."""
    lines = [line for log in server.paths.logs_dir.iterdir() for line in log.read_text().splitlines()]
    told = [line for line in lines if "this engine transfers no KV" in line]
    assert len(told) == (0 if why == [None, None] else 3)
    assert all(why[0] in line for line in told if why[0] is not None)


def test_vllm_has_no_kernel_for_the_first_mamba_on_a_cpu() -> None:
    # When this fails, it has: the families that fail for it run, and docs/guides/models.md is to be changed.
    assert not hasattr(torch.ops._C, "selective_scan_fwd")
