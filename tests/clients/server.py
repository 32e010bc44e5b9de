"""The server that the clients ask: the command of docs/guides/clients.md, on a model that can be told to think."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dynamo_local.model.named.names import QUICKSTART
from tests.clients.model import thinking_model
from tests.clients.page import server_options
from tests.e2e.llm_server import PATIENCE_S, LlmServer


@contextmanager
def serving(command: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """HOST:PORT of the server, once both its workers are ready, and the model's folder."""
    model = thinking_model(folder / "model")
    served = [f"--{service}.served-model-name=[{QUICKSTART}]" for service in ("Frontend", "VllmWorker")]
    options = [*server_options(command), f"--model={model}", *served]
    with LlmServer(folder / "state", "clients", options) as server:
        server.await_ready()
        server.await_workers(2)
        yield server.url.removeprefix("http://"), model
        server.signal(signal.SIGTERM)
        server.end(PATIENCE_S)
