"""The table of commands: it agrees with the commands, fits on a terminal, and costs no imports."""

from __future__ import annotations

import inspect
import subprocess
import sys

import click
import pytest

from dynamo_local.cli.commands import EXAMPLES, GROUPS, Entry
from dynamo_local.cli.main import dynamo, run

COLUMNS = 80
ENTRIES = [entry for entries in GROUPS.values() for entry in entries]
CONTEXT = click.Context(dynamo, info_name="dynamo")


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_table_agrees_with_the_command(entry: Entry) -> None:
    command = dynamo.get_command(CONTEXT, entry.name)
    assert command is not None
    assert command.name == entry.name
    assert inspect.cleandoc(command.help or "").partition("\n\n")[0] == entry.purpose


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_help_of_a_command_has_an_example(entry: Entry, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([entry.name, "--help"]) == 0
    assert f"\n  dynamo {entry.name} " in f"{capsys.readouterr().out} ".replace("\n", " \n")


def test_names_are_unique() -> None:
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)


def test_the_help_shows_each_command_in_its_group_uncut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= COLUMNS
    for title, entries in GROUPS.items():
        section = shown.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        lines = [line.split(maxsplit=1) for line in section.splitlines()]
        assert lines == [[entry.name, entry.purpose] for entry in entries]
    assert shown.endswith(EXAMPLES)


def test_the_examples_name_commands_that_exist() -> None:
    examples = [line.split() for line in EXAMPLES.splitlines() if line.startswith("  dynamo ")]
    assert examples
    for _, name, *_ in examples:
        assert dynamo.get_command(CONTEXT, name) is not None


def test_only_the_command_that_is_used_is_imported() -> None:
    script = """
import sys
from dynamo_local.cli.main import run
assert run(["--help"]) == 0
listed = [name for name in sys.modules if name.startswith("dynamo_local.cli.")]
assert run(["stop", "--help"]) == 0
print(sorted(listed))
print(sorted({name for name in sys.modules if name.startswith("dynamo_local.cli.")} - {*listed}))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    listed, used = result.stdout.splitlines()[-2:]
    assert listed == str([f"dynamo_local.cli.{name}" for name in ("commands", "main")])
    assert used == str([f"dynamo_local.cli.{name}" for name in ("completion", "options", "output", "server")])


def test_names_are_completed_without_importing_commands() -> None:
    script = """
import sys
from dynamo_local.cli.main import dynamo
import click
items = dynamo.shell_complete(click.Context(dynamo, info_name="dynamo"), "re")
print([item.value for item in items], [name for name in sys.modules if name.startswith("dynamo_local.cli.w")])
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "['requests', 'restart'] []"
