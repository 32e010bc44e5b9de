"""The load of `dynamo load`, for benchmarks that import the product: arrivals at a rate, and at times of their own."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.client import HOST
from benchmarks.harness.load import LETTERS
from benchmarks.harness.servers import Server
from dynamo_local.load.client import Asking, Client, Endpoint
from dynamo_local.load.session import Generator
from dynamo_local.load.workload import Alphabet, Prompts

_MAX_IN_FLIGHT = 1000


def endpoint_of(server: Server, key: str | None = None) -> Endpoint:
    """The address of the server's API."""
    return Endpoint(HOST, server.port, is_tls=False, path="", key=key)


def client_of(server: Server, **fields: Any) -> Client:
    """A client of the server's model, with connections of its own. `fields`: more fields of each request."""
    return Client(endpoint_of(server), Asking(server.model, is_chat=False, ignore_eos=True, extra=fields))


def generator_of(client: Client, seed: int) -> Generator:
    """A load of random token ids that the seed draws."""
    return Generator(client, Prompts(Alphabet(LETTERS, 0), seed), _MAX_IN_FLIGHT)
