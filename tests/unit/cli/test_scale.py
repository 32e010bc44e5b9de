"""What `dynamo scale` takes for a number of workers."""

from __future__ import annotations

import pytest

from dynamo_local.cli.workers import parse_targets
from dynamo_local.core.errors import UsageError


def test_targets_are_read() -> None:
    assert parse_targets(["VllmWorker=3", "PrefillWorker=0"]) == {"VllmWorker": 3, "PrefillWorker": 0}
    assert parse_targets(["my-chat=3", "7b=0"]) == {"my-chat": 3, "7b": 0}


@pytest.mark.parametrize("name", ["dynamo_VllmWorker", "VllmWorker_1", "second_VllmWorker_12"])
def test_the_name_of_a_watcher_is_told_from_that_of_its_service(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is the name of one process;.* VllmWorker; write VllmWorker=2"):
        parse_targets([f"{name}=2"])
    with pytest.raises(UsageError, match="number of processes is set for its endpoint, chat; write chat=2"):
        parse_targets(["chat@2_VllmWorker_1=2"])


@pytest.mark.parametrize("argument", ["VllmWorker", "VllmWorker=", "=1", "VllmWorker=-1", "VllmWorker=x", "A=1=2"])
def test_what_is_no_target_is_refused(argument: str) -> None:
    with pytest.raises(UsageError, match="does not say how many"):
        parse_targets([argument])
    with pytest.raises(UsageError, match="A is given twice"):
        parse_targets(["A=1", "A=2"])
