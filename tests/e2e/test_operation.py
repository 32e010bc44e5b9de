"""The server as its operator sees it: who is there, what they hold, what monitoring reads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import openai

from tests.e2e.llm_server import LlmServer, idle

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
    with ThreadPoolExecutor(4) as pool:
        streams = [
            pool.submit(
                client.completions.create,
                model=MODEL, prompt="x" * 200, max_tokens=800, extra_body={"ignore_eos": True},
            )
            for _ in range(4)
        ]  # fmt: skip
        await served.until(
            lambda workers: [w.load.running for w in workers if w.load is not None] == [2, 2],
            "four equal requests did not spread two and two",
        )
        assert all(stream.result().usage is not None for stream in streams)


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
    await served.until(idle, "the blocks did not come back")
