from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.core.errors import UsageError
from dynamo_local.sim.requests import mooncake


def test_a_trace_is_read_and_its_arrivals_are_scaled(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 3000, "input_length": 1024, "output_length": 0, "hash_ids": [0, 3]}\n'
    )
    first, second = mooncake(path, speed=2.0)
    # The last id of the first request names a part of a block.
    assert (first.at, first.prompt_tokens, first.output_tokens, first.keys) == (0.0, 1100, 5, (0, 1))
    assert (second.at, second.prompt_tokens, second.output_tokens, second.keys) == (1.5, 1024, 1, (0, 3))
    assert len(mooncake(path, most=1)) == 1


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("{}\n")
    with pytest.raises(UsageError, match="no trace"):
        mooncake(path)
    with pytest.raises(UsageError, match="no trace"):
        mooncake(tmp_path / "none")
