"""A revision whose model's files have changed starts no worker: another revision is made, once, if it can be run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from dynamo_local.core.endpoints.rollout import Start
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import ConfigError
from dynamo_local.core.names import Revision
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.supervisor.endpoints.revisions.launch import Launched, files_of, with_files
from dynamo_local.supervisor.endpoints.revisions.revision import RevisionRun
from tests.unit.supervisor.endpoints.made_parts import Record, endpoint_of, parts_of

CHAT = Revision("chat", 1)


class Launches:
    """A launcher whose launches fail with `error`; None: they succeed."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.launched = 0

    async def launch(self, revision: Revision, spec: EndpointSpec, progress: Callable[[str], None]) -> None:
        self.launched += 1
        if self.error is not None:
            raise self.error


def test_another_revision_is_made_once_for_files_that_can_be_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        launches = Launches()
        renewed: list[int] = []
        record = Record()
        weights = tmp_path / "weights"
        weights.write_text("old")

        async def renew(revision: int) -> None:
            renewed.append(revision)

        run = RevisionRun(CHAT, parts_of(launcher=launches, record=record), endpoint_of(lambda: None, renew))
        run.spec = EndpointSpec(name="chat", model=str(tmp_path))
        worker = ResolvedService("VllmWorker", "m:W", "aggregated", 1, 0, 0, {}, {"model": str(tmp_path)}, ())
        graph = ResolvedGraph("m:F", "ns", (worker,))
        files = files_of(graph)
        assert list(with_files(graph, files).services[0].envs.values()) == list(files.values())
        run.launched = Launched(graph, (), None, files)

        async def start() -> None:
            run.carry_out(Start(1, 1))
            assert run._task is not None
            await run._task

        weights.write_text("newer")
        launches.error = ConfigError("the model has no config.json")
        await start()
        launches.error = ValueError("two\nlines")
        await start()
        assert renewed == []
        assert record.told[0][2] == "the model has no config.json"
        assert record.told[1][2].endswith("they cannot be run: two lines")

        launches.error = None
        await start()
        assert renewed == [1]
        # That one has failed, and this one is ordered again.
        await start()
        assert (renewed, "have changed" in record.told[-1][2]) == ([1], True)
        weights.write_text("newest")
        await start()
        assert renewed == [1, 1]

    asyncio.run(scenario())
