"""A worker whose core somebody else uses goes elsewhere, and comes back once nobody does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import openai
import pytest

from dynamo_local.core.process.soft_binding import BindingLimits
from state.machine.threads import CoreWatch, cores_of, family_of, threads_of, times_of_all
from tests.e2e.llm_server import PATIENCE_S, LlmServer
from tests.unit.state.builders import spinning

LONG_QUIET_S = 2 * BindingLimits.quiet_max_s
"""The longest time for which an engine stays away from a quiet core, twice."""
LONG_CROWDED_S = 30.0
"""An engine leaves its core after a fraction of a second in which leaving pays."""


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


class Chance:
    """For how long others have left the worker's engine a reason to go where it is not. `others`: the share of each
    core that they use. `in_a_row`: a look without a reason begins anew."""

    def __init__(
        self, worker: Worker, is_one: Callable[[Mapping[int, float]], bool], enough_s: float, *, in_a_row: bool
    ) -> None:
        self._worker = worker
        self._is_one = is_one
        self._enough_s = enough_s
        self._in_a_row = in_a_row
        self._watch = CoreWatch(frozenset(os.sched_getaffinity(0)))
        self._given_s = 0.0

    def look(self) -> bool:
        """Whether it has had enough of it."""
        seen = self._watch.look(times_of_all(self._worker.engine))
        if seen is not None:
            shares, others = seen
            if self._is_one(others):
                self._given_s += shares.seconds
            elif self._in_a_row:
                self._given_s = 0.0
        return self._given_s > self._enough_s


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is nowhere to go on one core")
def test_an_engine_leaves_the_core_of_a_busy_neighbour_and_comes_back(served: LlmServer, client: openai.OpenAI) -> None:
    workers = [Worker(row["pid"]) for row in served.ps() if row["role"] == "aggregated"]

    def ask() -> None:
        client.completions.create(
            model="random", prompt="hello", max_tokens=60, temperature=0, extra_body={"ignore_eos": True}
        )

    def ask_until(met: Callable[[], bool], every_s: float = 0.0) -> bool:
        deadline = time.monotonic() + PATIENCE_S
        while not met():
            if time.monotonic() >= deadline:
                return False
            ask()
            time.sleep(every_s)
        return True

    before = {worker: worker.ran_s for worker in workers}
    ask()
    asked = max(workers, key=lambda worker: worker.ran_s - before[worker])
    (core,) = asked.home

    def is_better_elsewhere(others: Mapping[int, float]) -> bool:
        return min(others[one] for one in others if one != core) <= others[core] - BindingLimits.quieter

    def is_quiet(others: Mapping[int, float]) -> bool:
        return others[core] <= BindingLimits.quiet

    def await_home() -> None:
        returning = Chance(asked, is_quiet, LONG_QUIET_S, in_a_row=True)
        # Asked without a pause, client and frontend keep the core that the engine left too busy for it to come back.
        if not ask_until(lambda: asked.is_home() or returning.look(), every_s=1.0):
            pytest.skip("others use the core all the time, and the engine rightly stays away")
        assert asked.is_home()

    await_home()
    leaving = Chance(asked, is_better_elsewhere, LONG_CROWDED_S, in_a_row=False)
    with spinning(core):
        if not ask_until(lambda: asked.is_away() or leaving.look()):
            pytest.skip("others use all cores all the time, and the engine rightly stays")
        assert asked.is_away()
    await_home()
