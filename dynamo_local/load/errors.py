"""Errors of a load, and of its single requests."""

from __future__ import annotations

from dynamo_local.core.errors import DynamoError


class LoadError(DynamoError):
    """The endpoint cannot be loaded: it does not answer, or not like an OpenAI API."""


class ExchangeError(LoadError):
    """A request got no complete answer. It is counted under `kind`, and the load goes on."""

    def __init__(self, kind: str, cause: str) -> None:
        super().__init__(cause)
        self.kind = kind
