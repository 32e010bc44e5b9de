"""Workers with real vLLM are parked and woken: what they hold, and what clients notice."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.core.messages.admin import ParkAnswer, ParkQuestion
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.subjects import Subjects
from state.machine.processes import descendants
from tests.e2e.llm_server import PATIENCE_S, LlmServer, settled
from tests.e2e.streams import prompt

TURNS = 3


async def order(server: LlmServer, leases: list[str], *, parked: bool) -> list[str | None]:
    """The reasons of refusals."""
    bus = await Bus.connect(BusAddress.load(server.paths.bus_file), name="test")
    subjects = Subjects(server.paths.namespace, FIRST_OF_MAIN)
    asking = (
        bus.ask(subjects.parking(lease), ParkQuestion(parked), ParkAnswer, timeout_s=PATIENCE_S) for lease in leases
    )
    try:
        answers = await asyncio.gather(*asking)
    finally:
        await bus.close()
    assert all(answer.parked == parked for answer in answers if answer.refused is None)
    return [answer.refused for answer in answers]


def workers_of(server: LlmServer) -> list[dict[str, Any]]:
    return [row for row in server.ps() if row["role"] == "aggregated"]


def private_kib(pids: list[int]) -> int:
    """Memory that these processes share with no other."""
    return sum(_private(Path(f"/proc/{pid}/smaps_rollup").read_text()) for pid in pids)


def _private(rollup: str) -> int:
    return sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_"))


def ask(api: openai.OpenAI, salt: str, length: int = 300) -> str:
    answer = api.completions.create(
        model="random", prompt=prompt(length), max_tokens=20, temperature=0, extra_body={"cache_salt": salt}
    )
    return answer.choices[0].text


async def test_parked_workers_give_memory_back_and_answer_the_same_once_awake(
    pair: LlmServer, api: openai.OpenAI
) -> None:
    leases = [str(row["lease"]) for row in workers_of(pair)]
    pids = [pid for row in workers_of(pair) for pid in (row["pid"], *descendants(row["pid"]))]
    right = ask(api, "right")
    given_back: list[int] = []
    with ThreadPoolExecutor(3) as pool:
        for turn in range(TURNS):
            list(pool.map(lambda n, at=turn: ask(api, f"{at} {n}", 4000), range(3)))
            await pair.until(settled, "requests are left")
            full = private_kib(pids)
            assert await order(pair, leases, parked=True) == [None, None]
            given_back.append(full - private_kib(pids))
            assert {row["state"] for row in workers_of(pair)} == {"parked"}
            # One answers while the other one stays parked.
            assert await order(pair, leases[:1], parked=False) == [None]
            assert await asyncio.to_thread(ask, api, "right") == right
            assert await order(pair, leases[1:], parked=False) == [None]
    assert min(given_back) > 4096, f"KiB: {given_back}"
    await pair.until(settled, "the workers are not as before")
    assert [pid for row in workers_of(pair) for pid in (row["pid"], *descendants(row["pid"]))] == pids
