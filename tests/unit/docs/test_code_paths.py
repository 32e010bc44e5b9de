"""Files, folders and modules that the documentation names exist, where it says that they are."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOP = "benchmarks|components|docs|dynamo_local|examples|requirements|scripts|state|tests"
PYTHON = re.compile(r"(?<![\w/.-])((?:[\w.-]+/)*[\w-]+\.py)\b")
"""A Python file. Pages leave the first folders out where these are clear."""
BELOW_ROOT = re.compile(rf"(?<![\w/.-])((?:{TOP})/[\w./-]*\w)")
MODULE = re.compile(rf"(?:python -m |dynamo serve )((?:{TOP})(?:\.\w+)*)")
INLINE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^ *```(?P<info>.*)\n(?P<body>(?:.*\n)*?) *```", re.M)
PLACEHOLDER = "NAME"


def listed(*patterns: str) -> list[str]:
    """Files that git knows or would add, from the root of the checkout."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in found if (ROOT / name).exists()]


def missing(text: str, files: list[str]) -> list[str]:
    """Names in the code of a page for which there is no file."""
    folders = {str(folder) for file in files for folder in Path(file).parents}
    # A block with a file name behind its language is a file of its own (guides/clients.md).
    blocks = [block["body"] for block in FENCE.finditer(text) if " " not in block["info"].strip()]
    inline = INLINE.findall(FENCE.sub("", text))
    lost = {name for code in inline for name in PYTHON.findall(code) if not _ends_one(name, files)}
    for code in (*blocks, *inline):
        lost |= {name for name in BELOW_ROOT.findall(code) if name not in folders and name not in files}
        modules = {name: name.replace(".", "/") for name in MODULE.findall(code)}
        lost |= {name for name, path in modules.items() if path not in folders and f"{path}.py" not in files}
    return sorted(name for name in lost if PLACEHOLDER not in name)


def _ends_one(name: str, files: list[str]) -> bool:
    return any(f"/{file}".endswith(f"/{name}") for file in files)


@pytest.mark.parametrize("page", listed("*.md"))
def test_what_a_page_names_exists(page: str) -> None:
    assert missing((ROOT / page).read_text(), listed()) == []


def test_what_is_elsewhere_is_missing() -> None:
    files = ["dynamo_local/core/errors.py", "examples/graph.py", "docs/images/a.svg"]
    text = (
        "`core/errors.py` `errors.py` `pytest dynamo_local/core` `a/NAME.py` `docs/images/a.svg`\n"
        "```\ndynamo serve examples.graph:Frontend\n```\n```python use.py\nimport tests.none\n```\n"
    )
    assert missing(text, files) == []
    text = "`cli/errors.py` `rrors.py` `docs/none.svg`\n```\npython -m examples.none -f examples/none.yaml\n```\n"
    assert missing(text, files) == ["cli/errors.py", "docs/none.svg", "examples.none", "examples/none.yaml", "rrors.py"]
