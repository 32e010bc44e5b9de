"""What counts as code, and as a piece of one other file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.house import size

WHOLE = '''"""A module:
of two lines."""

import os
from dynamo_local.room import (
    piece,
)

# A comment.
NUMBER = 1
"""A docstring of an attribute."""


class Port(Protocol):
    """What it is."""

    async def ask(self) -> str:
        """Ask."""
        return """
        text
        """
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        "dynamo_local/__init__.py": "",
        "dynamo_local/room/__init__.py": '"""Empty."""\n',
        "dynamo_local/room/whole.py": WHOLE,
        "dynamo_local/room/piece.py": "X = 1\n",
        "dynamo_local/room/user.py": "import dynamo_local.room.piece\n",
        "state/whole.py": "import dynamo_local.room.whole\n",
        "tests/test_whole.py": "def test() -> None:\n    pass\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_blanks_comments_and_docstrings_are_no_code(checkout: Path) -> None:
    whole = size.module_of(Path("dynamo_local/room/whole.py"), WHOLE)
    assert whole.code_lines == 10
    assert whole.import_lines == 4
    assert (whole.functions, whole.classes, whole.protocols) == ((5,), ("Port",), 1)
    counted = size.count(checkout)
    assert (counted.code_lines, counted.files, counted.files_with_code) == (13, 6, 4)
    assert counted.packages == {"dynamo_local/room": 12, "state": 1, "dynamo_local": 0}
    assert counted.beside["tests"] == 2


def test_a_piece_is_imported_by_one_file_of_its_own_folder(checkout: Path) -> None:
    assert size.count(checkout).pieces == 1
    (checkout / "state" / "more.py").write_text("from dynamo_local.room.piece import X\n")
    assert size.count(checkout).pieces == 0


def test_the_figures_are_printed_as_json(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert size.main([str(checkout), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["largest_file"] == ["dynamo_local/room/whole.py", 10]
    assert printed["files_whose_name_another_has"] == 2
