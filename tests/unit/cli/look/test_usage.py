"""`dynamo usage` shows what was used, with or without a server, as text, JSON and CSV."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dynamo_local.cli.look.usage import usage
from dynamo_local.core.errors import UsageError
from dynamo_local.core.usage.records import UsageRecord
from state.paths import StatePaths
from state.usage.journal import UsageJournal


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("DYN_NAMESPACE", raising=False)
    journal = UsageJournal(StatePaths(tmp_path, "shop"), "lease", print)
    now = time.time()
    for age_s, key in ((0, "team-a"), (0, None), (3 * 86400, "team-a")):
        journal.write(UsageRecord(now - age_s, "chat", key, prompt=7, cached=3, output=2, seconds=0.5))
    journal.close()
    return CliRunner()


def shown(run: CliRunner, *arguments: str) -> Result:
    return run.invoke(usage, arguments, catch_exceptions=True)


def test_a_table_has_groups_and_a_total(run: CliRunner) -> None:
    head, names, *rows = shown(run).output.splitlines()
    assert head.startswith("usage")
    assert names.split() == ["KEY", "ENDPOINT", "REQUESTS", "FAILED", "PROMPT", "CACHED", "OUTPUT", "SECONDS"]
    assert [row.split() for row in rows] == [
        ["-", "chat", "1", "0", "7", "3", "2", "0.5"],
        ["team-a", "chat", "2", "0", "14", "6", "4", "1.0"],
        ["total", "3", "0", "21", "9", "6", "1.5"],
    ]
    assert "no request" in shown(run, "--until", "30d").output


def test_json_and_csv_have_what_was_asked_for(run: CliRunner) -> None:
    found = json.loads(shown(run, "--since", "1d", "--by", "key", "--json").output)
    assert [(row["key"], row["prompt_tokens"]) for row in found["data"]] == [(None, 7), ("team-a", 7)]
    (row,) = csv.DictReader(shown(run, "--by", "", "--csv", "--namespace", "shop").output.splitlines())
    assert (row["requests"], row["cached_tokens"], row["seconds"]) == ("3", "9", "1.5")


@pytest.mark.parametrize("wrong", [("--since", "soon"), ("--by", "color"), ("--json", "--csv")])
def test_mistakes_are_told(run: CliRunner, wrong: tuple[str, str]) -> None:
    result = shown(run, *wrong)
    assert isinstance(result.exception, UsageError)
