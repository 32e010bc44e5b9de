"""What the server tells of usage, whether frontends' journals are folded or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.control.operations import Call
from dynamo_local.core.errors import UsageError
from dynamo_local.core.usage.records import UsageRecord
from dynamo_local.supervisor.upkeep.usage import UsageUpkeep
from state.paths import StatePaths
from state.usage.journal import UsageJournal
from tests.unit.supervisor.recording import RecordingReport

HOUR = 3600.0


@pytest.fixture
def upkeep(tmp_path: Path) -> UsageUpkeep:
    """Of a server whose frontend runs."""
    paths = StatePaths(tmp_path, "n")
    journal = UsageJournal(paths, "lease", pytest.fail)
    for hour, key in ((1, "team-a"), (1, "team-b"), (30, "team-a")):
        journal.write(UsageRecord(hour * HOUR, "m", key, status=200, prompt=7, output=3, seconds=0.5))
    return UsageUpkeep(paths, RecordingReport(), wall_clock=lambda: 31 * HOUR)


@pytest.mark.parametrize("folded", [False, True])
async def test_what_was_used_is_told_by_group_and_time(upkeep: UsageUpkeep, folded: bool) -> None:
    if folded:
        upkeep.fold()
    of_a_day = await upkeep.tell(Call(query={"since": "1970-01-01", "until": "1970-01-02", "by": "key"}))
    rows = [(row["key"], row["requests"], row["prompt_tokens"]) for row in of_a_day["data"]]
    assert rows == [("team-a", 1, 7), ("team-b", 1, 7)]
    everything = await upkeep.tell(Call())
    assert [(row["key"], row["endpoint"], row["output_tokens"]) for row in everything["data"]] == [
        ("team-a", "m", 6),
        ("team-b", "m", 3),
    ]
    assert everything["total"]["seconds"] == 1.5
    assert (await upkeep.tell(Call(query={"since": "2h", "until": "", "by": ""})))["total"]["requests"] == 1


@pytest.mark.parametrize(
    ("query", "says"),
    [({"since": "yesterday"}, "yesterday"), ({"by": "color"}, "color"), ({"from": "1d"}, "no parameter 'from'")],
)
async def test_what_is_no_question_is_refused(upkeep: UsageUpkeep, query: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        await upkeep.tell(Call(query=query))
