"""A worker whose core somebody else uses goes elsewhere, and comes back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from dynamo_local.core.run_queue import ThreadTimes
from state.threads import CoreWatch, cores_of, family_of, threads_of, times_of_all
from tests.e2e.llm_server import LlmServer
from tests.unit.state.builders import spinning

GOES_WITHIN_S = 40.0
CROWDED = 0.15
"""With so much of a core in other hands on average, an engine may be right to stay where it is."""


class Worker:
    """As /proc shows it."""

    def __init__(self, pid: int) -> None:
        settings = dict(
            line.partition("=")[::2] for line in Path(f"/proc/{pid}/environ").read_text().split("\0") if line
        )
        self.home = frozenset(int(core) for core in settings["DYN_CPU_CORES"].split(","))
        self.engine = [one for one in family_of(pid) if "VLLM" in Path(f"/proc/{one}/comm").read_text()]

    @property
    def ran_s(self) -> float:
        return sum(times.ran_s for times in times_of_all(self.engine).values())

    def is_home(self) -> bool:
        """With all threads of its engine. (None reads KV here.)"""
        return all(cores == self.home for cores in self._cores())

    def is_away(self) -> bool:
        """With all threads."""
        return all(cores.isdisjoint(self.home) for cores in self._cores())

    def _cores(self) -> list[frozenset[int]]:
        return [cores_of(thread) for one in self.engine for thread in threads_of(one)]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is nowhere to go on one core")
def test_an_engine_leaves_the_core_of_a_busy_neighbour_and_comes_back(served: LlmServer, client: openai.OpenAI) -> None:
    workers = [Worker(row["pid"]) for row in served.ps() if row["role"] == "aggregated"]

    def ask() -> None:
        client.completions.create(
            model="quickstart", prompt="hello", max_tokens=60, temperature=0, extra_body={"ignore_eos": True}
        )

    def ask_until(met: Callable[[], bool], cores: frozenset[int]) -> None:
        """For this, others have to leave these cores alone."""
        watch, deadline = CoreWatch(cores), time.monotonic() + GOES_WITHIN_S
        watch.look(ours())
        while not met() and time.monotonic() < deadline:
            ask()
        seen = watch.look(ours())
        if not met() and seen is not None and max(seen[1].values()) > CROWDED:
            pytest.skip("others use the machine")
        assert met()

    def ours() -> dict[int, ThreadTimes]:
        return times_of_all(pid for worker in workers for pid in worker.engine)

    before = {worker: worker.ran_s for worker in workers}
    ask()
    asked = max(workers, key=lambda worker: worker.ran_s - before[worker])
    ask_until(asked.is_home, asked.home)
    (core,) = asked.home
    with spinning(core):
        ask_until(asked.is_away, frozenset(os.sched_getaffinity(0)) - asked.home)
    ask_until(asked.is_home, asked.home)
