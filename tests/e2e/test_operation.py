"""The server as its operator sees it: who is there, what they hold, what monitoring reads."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai

from dynamo_local.core.messages import Presence
from tests.e2e.llm_server import LlmServer, settled

MODEL = "quickstart"


def test_ps_lists_every_process(served: LlmServer) -> None:
    rows = {row["watcher"]: row for row in served.ps()}
    assert set(rows) == {"e2e_Nats", "e2e_Frontend", "e2e_Router", "e2e_VllmWorker", "e2e_VllmWorker_1"}
    assert {row["state"] for row in rows.values()} == {"ready"}
    assert rows["e2e_VllmWorker"]["role"] == rows["e2e_VllmWorker_1"]["role"] == "aggregated"
    assert sorted(rows["e2e_VllmWorker"]["devices"] + rows["e2e_VllmWorker_1"]["devices"]) == [0, 1]
    assert len({row["pid"] for row in rows.values()}) == 5


def test_logs_of_a_service(served: LlmServer) -> None:
    assert served.command("logs", "Frontend") is not None


def test_health_and_metrics_need_no_key(served: LlmServer) -> None:
    for path in ("/live", "/health", "/metrics"):
        assert httpx.get(f"{served.url}{path}").status_code == 200
    assert "vllm:time_to_first_token_seconds_count" in httpx.get(f"{served.url}/metrics").text


async def test_load_spreads_over_both_workers(served: LlmServer, client: openai.OpenAI) -> None:
    most_running: Counter[str] = Counter()

    def finished(workers: list[Presence]) -> bool:
        for worker in workers:
            if worker.load is not None and worker.load.running is not None:
                most_running[worker.watcher] = max(most_running[worker.watcher], worker.load.running)
        return all(stream.done() for stream in streams)

    with ThreadPoolExecutor(4) as pool:
        streams = [
            pool.submit(
                client.completions.create,
                model=MODEL,
                prompt="x" * 200,
                max_tokens=800,
                extra_body={"ignore_eos": True},
            )
            for _ in range(4)
        ]
        await served.until(finished, "four requests did not end")
    # How many each got is the policy's to say (tests/unit/core/test_routing.py). On a busy machine a worker that is not
    # heard of for two seconds loses its requests to the other: one may well have had all four, but not from the start.
    used = {watcher for watcher, running in most_running.items() if running > 0}
    assert used == {"e2e_VllmWorker", "e2e_VllmWorker_1"}


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
