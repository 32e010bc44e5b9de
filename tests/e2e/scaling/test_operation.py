"""The server as its operator sees it: who is there, what they hold, what monitoring reads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai

from dynamo_local.core.messages.presence import Presence
from tests.e2e.llm_server import PATIENCE_S, LlmServer, settled
from tests.e2e.scaling.stories import Stories
from tests.integration.server_process import eventually

MODEL = "random"
STREAMS = 4
TOKENS = 200


def test_ps_lists_every_process(served: LlmServer) -> None:
    rows: dict[str, Any] = {}

    def all_ready() -> bool:
        """Who does not answer within two seconds is shown as silent."""
        rows.update({row["watcher"]: row for row in served.ps()})
        return {row["state"] for row in rows.values()} == {"ready"}

    eventually(all_ready, "somebody is not ready", PATIENCE_S)
    services = ("Frontend", "Planner", "Router", "VllmWorker", "VllmWorker_1")
    assert set(rows) == {f"e2e_{name}" for name in ("Nats", "ForkServer", *services)}
    assert rows["e2e_VllmWorker"]["role"] == rows["e2e_VllmWorker_1"]["role"] == "aggregated"
    assert sorted(rows["e2e_VllmWorker"]["devices"] + rows["e2e_VllmWorker_1"]["devices"]) == [0, 1]
    assert len({row["pid"] for row in rows.values()}) == 7


def test_logs_of_a_service(served: LlmServer) -> None:
    assert served.command("logs", "Frontend") is not None


def test_health_and_metrics_need_no_key(served: LlmServer) -> None:
    for path in ("/live", "/health", "/metrics"):
        assert httpx.get(f"{served.url}{path}").status_code == 200
    assert "vllm:time_to_first_token_seconds_count" in httpx.get(f"{served.url}/metrics").text


async def test_load_spreads_over_both_workers(served: LlmServer, client: openai.OpenAI) -> None:
    # How many each gets is the policy's to say (tests/unit/core/routing/test_ledger.py).
    with ThreadPoolExecutor(STREAMS) as pool:
        stories = Stories.undisturbed(pool, client, STREAMS, TOKENS)
        clients = stories.begin(pool)
        try:
            await served.until(all_busy, "a worker gets nothing to do")
        finally:
            stories.end()
        for asking in clients:
            asking.result()


def all_busy(workers: list[Presence]) -> bool:
    return len(workers) == 2 and all(one.load is not None and one.load.running for one in workers)


async def test_a_client_that_leaves_frees_the_blocks(served: LlmServer, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="y" * 500, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    await served.until(
        lambda workers: any(w.load is not None and (w.load.kv_usage or 0) > 0 for w in workers),
        "the request holds no blocks",
    )
    stream.close()
    await served.until(settled, "the blocks did not come back")
