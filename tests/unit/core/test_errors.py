"""Errors: one line for the reader, one tree for the code."""

from __future__ import annotations

import pytest

from dynamo_local.core import errors
from dynamo_local.core.errors import ConfigError, DynamoError, EngineError, UsageError


def test_an_error_says_its_cause_and_what_to_do() -> None:
    assert str(ConfigError("no such key 'a'", "did you mean 'b'?")) == "no such key 'a'; did you mean 'b'?"
    assert str(EngineError("the engine died")) == "the engine died"


@pytest.mark.parametrize(
    "kind", [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
)
def test_the_exit_code_tells_usage_from_failure(kind: type[DynamoError]) -> None:
    assert issubclass(kind, DynamoError)
    assert kind.exit_code == (2 if issubclass(kind, UsageError) else 1)
