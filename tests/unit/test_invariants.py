"""Every test that docs/internals/invariants.md names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)?(?:::(test_\w+))?`")


def test_each_invariant_names_a_test_that_exists() -> None:
    rows = (ROOT / "docs/internals/invariants.md").read_text().splitlines()
    invariants = [row for row in rows if re.match(r"\| \d+ \|", row)]
    assert [int(row.split("|")[1]) for row in invariants] == list(range(1, len(invariants) + 1))
    for row in invariants:
        file = ""
        for path, test in NAMED.findall(row):
            file = path or file
            assert (ROOT / file).is_file(), row
            assert not test or f"def {test}(" in (ROOT / file).read_text(), f"{test} of {file}"
        assert file or "make chaos" in row, row
