"""Proxies of the environment are for the hub of models. Requests to our own servers never take one."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dynamo_local.load.client import find_model, parse_url
from dynamo_local.monitor.scraping import _get

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = "http://127.0.0.1:9"

_PROXIED = frozenset({"aiohttp", "httpx", "httpx2", "requests", "urllib.request", "urllib3"})
"""Modules that take proxies from the environment."""
_OF_THE_HUB = ROOT / "dynamo_local" / "model"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"data": [{"id": "m"}]}' if self.path == "/v1/models" else b"# nothing\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet: a test's output is its own."""


@contextmanager
def serving() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def _proxy_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, NOWHERE)
        monkeypatch.setenv(name.lower(), NOWHERE)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


def test_metrics_are_read_past_a_proxy() -> None:
    with serving() as url:
        assert _get(f"{url}/metrics") == "# nothing\n"


async def test_the_load_goes_past_a_proxy() -> None:
    with serving() as url:
        endpoint = parse_url(url)
        connections = endpoint.connections()
        assert await find_model(connections, endpoint, None) == ("m", None)


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def test_only_models_are_fetched_with_a_library_that_takes_proxies() -> None:
    found = {
        str(path.relative_to(ROOT)): sorted(_PROXIED.intersection(imported(path)))
        for package in ("components", "dynamo_local", "state")
        for path in (ROOT / package).rglob("*.py")
        if not path.is_relative_to(_OF_THE_HUB) and _PROXIED.intersection(imported(path))
    }
    assert found == {}
