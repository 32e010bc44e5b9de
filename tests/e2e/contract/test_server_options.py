"""Options of `vllm serve` about the HTTP server in front of all models: each changes what clients or the log see."""

from __future__ import annotations

import asyncio
import json
import logging
import logging.config
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from components.frontend.http.gate import HttpGate
from components.frontend.http.models import ModelTable
from components.frontend.limits.places import Places
from components.frontend.limits.rooms import Rooms
from dynamo_local.bus.certificate import Certificate, make_certificate
from dynamo_local.core.errors import EngineError
from dynamo_local.core.http.asgi import App
from dynamo_local.core.http.bounds.admission import AdmissionLimits

pytest.importorskip("vllm", reason="vLLM is not installed")

from dynamo_local.engine.vllm.frontend.server import HttpServer

PATIENCE_S = 60.0
KEY = "a-key"


@pytest.fixture(autouse=True)
def logs() -> Iterator[None]:
    """What an option does to the loggers of uvicorn and vLLM ends with its test."""
    before = {name: logging.getLogger(name) for name in ("uvicorn", "uvicorn.access", "uvicorn.error", "vllm")}
    kept = {name: (log.level, log.handlers[:], log.propagate) for name, log in before.items()}
    yield
    for name, (level, handlers, propagate) in kept.items():
        log = before[name]
        log.level, log.handlers, log.propagate = level, handlers, propagate
        log.manager._clear_cache()  # type: ignore[attr-defined]


@asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncIterator[int]:
    """Serve with these options, behind a gate that wants a key. Gives the port."""
    limits = AdmissionLimits()

    def gate(app: App) -> App:
        return HttpGate(app, limits=limits, models=ModelTable([]), is_draining=lambda: False, api_keys=[KEY])

    async def cards() -> list[dict[str, Any]]:
        return [{"id": "model"}]

    config = {name.replace("_", "-"): value for name, value in options.items()}
    server = HttpServer(config, folder, gate, limits, cards, Rooms(Places(folder / "limits")))
    listener = socket.create_server(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]
    await server.start(listener, lambda _: None)
    try:
        yield port
    finally:
        await server.stop(PATIENCE_S)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Options that name a certificate and its key."""
    write(make_certificate("127.0.0.1"), tmp_path)
    return {"ssl_certfile": str(tmp_path / "cert.pem"), "ssl_keyfile": str(tmp_path / "key.pem")}


def write(made: Certificate, folder: Path) -> None:
    for name, text in (("cert.pem", made.chain), ("key.pem", made.key), ("ca.pem", made.authority.encode())):
        new = folder / f"{name}.new"
        new.write_bytes(text)
        new.rename(folder / name)


async def shown(port: int, ciphers: str | None = None) -> tuple[str, bytes]:
    """The cipher and the certificate of a TLS 1.2 connection. Raises SSLError."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    if ciphers is not None:
        context.set_ciphers(ciphers)
    async with asyncio.timeout(PATIENCE_S):
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        try:
            socket_of = writer.get_extra_info("ssl_object")
            return socket_of.cipher()[0], socket_of.getpeercert(binary_form=True)
        finally:
            writer.close()


GOOD, EXCLUDED = "ECDHE-ECDSA-AES256-GCM-SHA384", "ECDHE-ECDSA-AES128-GCM-SHA256"


async def test_a_cipher_that_is_not_listed_does_not_connect(tmp_path: Path, files: dict[str, str]) -> None:
    async with serving(tmp_path, **files, ssl_ciphers=GOOD) as port:
        assert (await shown(port, f"{GOOD}:{EXCLUDED}"))[0] == GOOD
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await shown(port, EXCLUDED)


@pytest.mark.parametrize("wrong", [{"ssl_ciphers": "no-such-cipher"}, {"ssl_certfile": "/no/such/file"}])
async def test_what_tls_cannot_use_is_an_error_of_the_start(
    tmp_path: Path, files: dict[str, str], wrong: dict[str, str]
) -> None:
    with pytest.raises(EngineError, match="the OpenAI server cannot start"):
        async with serving(tmp_path, **{**files, **wrong}):
            pass


async def test_a_certificate_that_is_replaced_is_shown_to_new_connections(
    tmp_path: Path, files: dict[str, str]
) -> None:
    async with serving(tmp_path, **files, enable_ssl_refresh=True) as port:
        _, before = await shown(port)
        write(make_certificate("127.0.0.1"), tmp_path)
        async with asyncio.timeout(PATIENCE_S):
            while (await shown(port))[1] == before:  # noqa: ASYNC110  # it tells nobody
                await asyncio.sleep(0.05)


async def test_clients_without_a_certificate_are_refused_if_one_is_required(
    tmp_path: Path, files: dict[str, str]
) -> None:
    options = {**files, "ssl_ca_certs": str(tmp_path / "ca.pem"), "ssl_cert_reqs": int(ssl.CERT_REQUIRED)}
    async with serving(tmp_path, **options) as port:
        # In TLS 1.2 the client learns of it while it connects.
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await shown(port)


def client(port: int) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=PATIENCE_S)


@pytest.mark.parametrize("root", ["/llm", "llm/", "/v1", "/v1/models"])
async def test_each_path_answers_with_and_without_the_prefix(tmp_path: Path, root: str) -> None:
    prefix = f"/{root.strip('/')}"
    async with serving(tmp_path, root_path=root) as port, client(port) as asks:
        for path in ("/v1/models", "/v1/models/model", "/version", "/docs", "/openapi.json", "/static/swagger-ui.css"):
            assert (await asks.get(f"{prefix}{path}")).status_code == 200, path
            if not path.startswith(prefix):
                assert (await asks.get(path)).status_code == 200, path


async def test_a_prefix_opens_no_path(tmp_path: Path) -> None:
    """The gate judges the path that is left, and the application answers at that one: the prefix is removed once."""
    async with serving(tmp_path, root_path="/v1/models") as port, client(port) as asks:
        for path in ("/sleep", "/v1/load_lora_adapter", "", "/", "/v1", "//v1/models"):
            assert (await asks.get(f"/v1/models{path}")).status_code == 404, path
        for path in ("/v1/models/v1/models/version", "/v1/models/v1/models/health", "/v1/modelsx/version"):
            # One model by its name at most, never the path behind a second prefix.
            assert (await asks.get(path)).status_code == 404, path
        asks.headers.pop("Authorization")
        for path in ("/v1/models/v1/models", "/v1/models/v1/models/model"):
            assert (await asks.get(path)).status_code == 401, path
        assert (await asks.post("/v1/models/v1/completions", json={})).status_code == 401


async def test_the_documentation_is_complete_behind_a_proxy(tmp_path: Path) -> None:
    async with serving(tmp_path, root_path="/llm") as port, client(port) as asks:
        page = (await asks.get("/docs")).text
        for part in ("/llm/openapi.json", "/llm/static/swagger-ui-bundle.js", "/llm/static/swagger-ui.css"):
            assert part in page
            assert (await asks.get(part)).status_code == 200
        assert (await asks.get("/openapi.json")).json()["servers"] == [{"url": "/llm"}]


async def test_without_documentation_its_paths_are_closed(tmp_path: Path) -> None:
    async with serving(tmp_path, disable_fastapi_docs=True) as port, client(port) as asks:
        found = [(await asks.get(path)).status_code for path in ("/docs", "/openapi.json", "/static/swagger-ui.css")]
        assert found == [404, 404, 404]


async def test_documentation_of_the_network_loads_its_scripts_from_there(tmp_path: Path) -> None:
    async with serving(tmp_path, enable_offline_docs=False) as port, client(port) as asks:
        assert "https://" in (await asks.get("/docs")).text
        assert (await asks.get("/static/swagger-ui.css")).status_code == 404


@pytest.mark.parametrize(
    ("options", "logged"),
    [
        ({}, []),
        ({"disable_uvicorn_access_log": False}, ["/version", "/ping"]),
        ({"disable_uvicorn_access_log": False, "uvicorn_log_level": "warning"}, []),
        ({"disable_access_log_for_endpoints": "/ping, /metrics"}, ["/version"]),
        ({"disable_access_log_for_endpoints": "/ping", "disable_uvicorn_access_log": True}, []),
        ({"disable_access_log_for_endpoints": "/ping", "disable_uvicorn_access_log": False}, ["/version"]),
    ],
)
async def test_the_access_log_has_the_paths_that_it_is_to_have(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], options: dict[str, Any], logged: list[str]
) -> None:
    async with serving(tmp_path, **options) as port, client(port) as asks:
        for path in ("/version", "/ping"):
            await asks.get(path)
    lines = capfd.readouterr().out.splitlines()
    assert [line.split('"GET ')[1].split()[0] for line in lines if '"GET ' in line] == logged


async def test_a_file_configures_the_log(tmp_path: Path) -> None:
    target, file = tmp_path / "log", tmp_path / "log.json"
    handler = {"class": "logging.FileHandler", "filename": str(target)}
    config = {"version": 1, "disable_existing_loggers": False, "handlers": {"file": handler}}
    named = {"level": "INFO", "handlers": ["file"], "propagate": False}
    file.write_text(json.dumps({**config, "loggers": {"uvicorn.access": named, "vllm": named}}))
    options = {"log_config_file": str(file), "disable_uvicorn_access_log": False}
    async with serving(tmp_path, **options) as port, client(port) as asks:
        await asks.get("/version")
        logging.getLogger("vllm.x").info("of vLLM")
    assert "GET /version" in target.read_text()
    assert "of vLLM" in target.read_text()


async def test_pages_of_an_origin_are_let_in(tmp_path: Path) -> None:
    origin = "https://app.example"
    options = {"allowed_origins": [origin], "allow_credentials": True, "allowed_methods": ["GET"]}
    async with serving(tmp_path, **options, allowed_headers=["x-mine"]) as port, client(port) as asks:
        asked = {"Origin": origin, "Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "x-mine"}
        headers = (await asks.options("/v1/models", headers=asked)).headers
        assert headers["access-control-allow-origin"] == origin
        assert headers["access-control-allow-credentials"] == "true"
        assert headers["access-control-allow-methods"] == "GET"
        assert "x-mine" in headers["access-control-allow-headers"]
        other = {**asked, "Access-Control-Request-Method": "POST"}
        assert (await asks.options("/v1/models", headers=other)).status_code == 400


async def test_answers_have_the_ids_of_their_requests(tmp_path: Path) -> None:
    async with serving(tmp_path, enable_request_id_headers=True) as port, client(port) as asks:
        assert (await asks.get("/version", headers={"X-Request-Id": "mine"})).headers["x-request-id"] == "mine"
