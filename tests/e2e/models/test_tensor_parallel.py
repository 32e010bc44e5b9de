"""Workers whose model is split among two ranks, each on a CPU slot of its own: as good as any other."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from state.machine.threads import cores_of, family_of, threads_of
from state.remains import SHARED_MEMORY, segments_of
from tests.e2e.llm_server import PATIENCE_S, LlmServer, settled
from tests.e2e.streams import Stream, begin, migrate, prompt, requests

TOKENS = 250


@pytest.fixture(scope="module")
def client(ranks: LlmServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{ranks.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="module")
def alone(client: openai.OpenAI) -> list[int]:
    """The tokens that come when nothing happens."""
    return tokens_of(stream(client, "alone").read())


def stream(client: openai.OpenAI, salt: str) -> Stream:
    return Stream(client, prompt(300), TOKENS, {"temperature": 0}, salt)


def tokens_of(answer: dict[int, list[object]]) -> list[int]:
    tokens = answer[0][0]
    assert isinstance(tokens, list)
    return tokens


def rank_processes(host: int) -> list[int]:
    """By rank."""
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family_of(host)}
    return sorted((pid for pid, title in titles.items() if b"::Worker" in title), key=lambda pid: titles[pid])


def test_each_rank_has_the_cores_of_its_slot(ranks: LlmServer) -> None:
    cores = sorted(os.sched_getaffinity(0))
    slots = [{cores[slot % len(cores)]} for slot in range(4)]
    for row in ranks.ps():
        if row["component"] == "VllmWorker":
            processes = rank_processes(row["pid"])
            assert len(processes) == len(row["devices"]) == 2
            for process, slot in zip(processes, row["devices"], strict=True):
                assert {core for thread in threads_of(process)[:1] for core in cores_of(thread)} == slots[slot]


async def test_a_request_moves_with_its_kv(ranks: LlmServer, client: openai.OpenAI, alone: list[int]) -> None:
    moving = stream(client, "moved")
    with ThreadPoolExecutor(1) as pool:
        reading = begin(pool, moving)
        (row,) = requests(ranks)
        (result,) = migrate(ranks, row["worker"])
        assert tokens_of(reading.result()) == alone
    assert (result["outcome"], result["warm_s"] is not None) == ("migrated", True), result
    await ranks.until(settled, "blocks are still held or pinned")


def test_streams_go_on_when_a_rank_is_killed(ranks: LlmServer, client: openai.OpenAI, alone: list[int]) -> None:
    hosts = {row["watcher"]: row["pid"] for row in ranks.ps()}
    streams = [stream(client, f"killed {number}") for number in range(2)]
    with ThreadPoolExecutor(len(streams)) as pool:
        reading = [begin(pool, each) for each in streams]
        worker = requests(ranks)[0]["worker"]
        os.kill(rank_processes(hosts[worker])[1], signal.SIGKILL)
        assert not any(each.done() for each in reading)
        assert [tokens_of(each.result()) for each in reading] == [alone, alone]
    ranks.await_workers(2)
    assert {row["watcher"] for row in ranks.ps() if row["pid"] != hosts[row["watcher"]]} == {worker}


@pytest.mark.ends_server
def test_its_end_leaves_nothing(ranks: LlmServer) -> None:
    segments = {segment for pid in ranks.tree() for segment in segments_of(pid)}
    if "avx512f" in Path("/proc/cpuinfo").read_text():
        # Otherwise vLLM's ranks talk by sockets.
        assert any("cpushm" in segment.name for segment in segments), "ranks talk otherwise by now"
    ranks.signal(signal.SIGTERM)
    assert ranks.end(PATIENCE_S) == 0
    ranks.assert_nothing_left()
    assert [segment for segment in segments if (SHARED_MEMORY / segment.name).exists()] == []
