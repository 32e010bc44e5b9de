"""Python files that the documentation names exist, under the name and in the folder that it gives them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FENCE = re.compile(r"^ *```.*?^ *```", re.M | re.S)
NAMED = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.py)`")
PLACEHOLDER = "NAME"


def listed(*patterns: str) -> list[str]:
    """Files that git knows or would add, from the root of the checkout."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in found if (ROOT / name).exists()]


def missing(text: str, files: list[str]) -> list[str]:
    """Named files that are the end of no path. Pages leave the first folders out where these are clear."""
    named = {name for name in NAMED.findall(FENCE.sub("", text)) if PLACEHOLDER not in name}
    return sorted(name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files))


@pytest.mark.parametrize("page", listed("*.md"))
def test_files_that_a_page_names_exist(page: str) -> None:
    assert missing((ROOT / page).read_text(), listed("*.py")) == []


def test_a_file_that_is_elsewhere_is_missing() -> None:
    files = ["dynamo_local/core/errors.py"]
    assert missing("`core/errors.py` `errors.py` `NAME.py`\n```\n`none.py`\n```\n", files) == []
    assert missing("`cli/errors.py` `rrors.py`", files) == ["cli/errors.py", "rrors.py"]
