"""The planner with real engines: a second worker comes with the load, goes with it, and no request notices."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import openai
import pytest

from tests.e2e.llm_server import PATIENCE_S, LlmServer, none_of
from tests.e2e.scaling.stories import Stories

STREAMS = 8
LEFT = 2
TOKENS = 144
"""A stream holds 1 to 6 KV blocks, 3.5 in the mean, of the 14 that a worker has. So eight have too few by far, even
with two workers; two never fill one worker above the planner's threshold of 0.9."""

OPTIONS = [
    "examples.llm.graphs.agg:Frontend",
    "--file=examples/llm/configs/agg.yaml",
    "--model=random",
    "--cpu-slots=2",
    "--Frontend.max-model-len=256",
    "--VllmWorker.max-model-len=256",
    "--VllmWorker.num-gpu-blocks-override=15",
    "--VllmWorker.dtype=float32",
    "--Planner.no-operation=false",
    "--Planner.adjustment-interval=2",
    "--Planner.metric-pulling-interval=0.25",
    # A worker that leaves may take its time; nothing is to be cut short on a busy machine.
    f"--drain-timeout={PATIENCE_S}",
    f"--Frontend.drain-timeout-s={PATIENCE_S}",
    f"--VllmWorker.drain-timeout-s={PATIENCE_S}",
]
ADDED = "planned_VllmWorker_1"


class Entry:
    """What has become of an entry of the statefile: each state once, in order."""

    def __init__(self, server: LlmServer, watcher: str) -> None:
        self._server = server
        self._watcher = watcher
        self.states: list[tuple[str | None, tuple[int, ...]] | None] = []

    def look(self, then: Callable[[list[Any]], bool]) -> Callable[[list[Any]], bool]:
        """The same condition, which looks at the entry first."""

        def looked(workers: list[Any]) -> bool:
            entry = self._server.state().components.get(self._watcher)
            state = None if entry is None else (entry.phase, entry.devices)
            if not self.states or self.states[-1] != state:
                self.states.append(state)
            return then(workers)

        return looked

    @property
    def gone(self) -> bool:
        return self.states[-1] is None


def both_busy(workers: list[Any]) -> bool:
    return [bool(one.load and one.load.running) for one in workers] == [True, True]


def assert_comes_and_goes(states: list[Any]) -> None:
    """In that order, one after the other. What lasts for a moment only needs not have been seen."""
    order = [None, ("starting", (1,)), (None, (1,)), ("retiring", (1,))]
    assert states[0] is states[-1] is None
    assert (None, (1,)) in states
    # Before it is claimed, and after, a device may be seen to be reserved.
    turns = [order.index(state) for state in states if state is None or state[0] != "reserved"]
    assert all(later > earlier or later == 0 for earlier, later in pairwise(turns)), states


@pytest.mark.usefixtures("own_servers")
async def test_a_worker_comes_with_the_load_and_goes_with_it_and_no_request_fails(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    # A short name: unix sockets lie in it.
    with LlmServer(tmp_path_factory.mktemp("planned") / "state", "planned", OPTIONS) as server:
        server.await_ready()
        entry = Entry(server, ADDED)
        await server.until(entry.look(lambda workers: len(workers) == 1), "there is not one worker")
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client,
            ThreadPoolExecutor(STREAMS) as pool,
        ):
            with ThreadPoolExecutor(LEFT) as few:
                stories = Stories.undisturbed(few, client, STREAMS, TOKENS)
            clients = stories.begin(pool)
            try:
                await server.until(entry.look(both_busy), "no worker was added, or it gets nothing to do")
                processes = server.tree()
                stories.end(left=LEFT)
                await server.until(entry.look(lambda _: entry.gone), "the worker that was added stays")
                await server.until(stories.goes_on(), "requests are not answered any more")
            finally:
                stories.end()
            for asking in clients:
                asking.result()
        assert_comes_and_goes(entry.states)
        lines = [json.loads(line) for line in server.paths.decisions_file.read_text().splitlines()]
        done = [(one["action"], one["watcher"], one["done"]) for line in lines for one in line["outcomes"]]
        # Nothing else, and by turns: on a busy machine the load may look gone for a while.
        both = [("add an aggregated worker", ADDED, True), ("remove VllmWorker_1", ADDED, True)]
        assert done == both * (len(done) // 2)
        assert done
        assert all(line["devices"] <= line["max_devices"] == 2 for line in lines)
        server.signal(signal.SIGTERM)
        assert server.end(PATIENCE_S) == 0
        assert none_of(processes)
        server.assert_nothing_left()
