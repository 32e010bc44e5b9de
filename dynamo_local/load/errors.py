"""What can go wrong with a load, or with one of its requests."""

from __future__ import annotations

from dynamo_local.core.errors import DynamoError


class LoadError(DynamoError):
    """The endpoint cannot be loaded at all: nobody answers, or not with what a client of OpenAI expects."""


class ExchangeError(LoadError):
    """One request got no whole answer. Counted under its `kind`, and told no further."""

    def __init__(self, kind: str, cause: str) -> None:
        super().__init__(cause)
        self.kind = kind
