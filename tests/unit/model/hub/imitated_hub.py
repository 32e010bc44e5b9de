"""A hub of models on loopback: the part of the Hugging Face Hub's HTTP interface that fetching a model needs.

The list of a model's files, their metadata by HEAD, their content by GET with ranges and a redirect to another
address for large files, as the hub does it: https://huggingface.co/docs/hub/api
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

REPO = "org/name"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class ImitatedHub:
    """What the hub has and how it misbehaves. All may be changed while it runs.

    `token`: needed for everything if set; `gated`: files are refused. `failing`: how many requests to paths with
    `failing_at` are answered with `failure`. `cut`: after how many bytes the weights break off, for `cuts` times.
    `stalled`: weights stop half-way until `resume` is set, and their rest does not begin. `no_ranges`: ranges are
    ignored.
    """

    files: dict[str, bytes]
    url: str = ""
    token: str | None = None
    gated: bool = False
    failing: int = 0
    failing_at: str = ""
    failure: int = 503
    cut: int | None = None
    cuts: int = 1_000_000
    stalled: bool = False
    no_ranges: bool = False
    no_etags: bool = False
    wrong_digest: bool = False
    listed_sizes: dict[str, int] = field(default_factory=dict)
    resume: threading.Event = field(default_factory=threading.Event)
    requests: Counter[str] = field(default_factory=Counter)
    ranges: list[str] = field(default_factory=list)
    asked_for_content: threading.Event = field(default_factory=threading.Event)

    def listing(self) -> dict[str, Any]:
        siblings = [
            {"rfilename": name, "size": self.listed_sizes.get(name, len(content)), "blobId": "0" * 40}
            for name, content in self.files.items()
        ]
        return {"id": REPO, "sha": COMMIT, "siblings": siblings, "private": False, "gated": False}

    def etag(self, name: str) -> str:
        digest = hashlib.sha256(self.files[name]).hexdigest()
        return digest[::-1] if self.wrong_digest and name.endswith(".safetensors") else digest


@contextmanager
def imitated_hub(files: dict[str, bytes]) -> Iterator[ImitatedHub]:
    hub = ImitatedHub(files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.resume.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: ImitatedHub, *request: Any) -> None:
        self.hub = hub
        super().__init__(*request)

    def log_message(self, *_: object) -> None:
        """Quiet: a test's output is its own."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = urlsplit(self.path).path
        kind = path.removeprefix("/").partition("/")[0]
        self.hub.requests[f"{self.command} {path}"] += 1
        if self.hub.failing > 0 and self.hub.failing_at in path:
            self.hub.failing -= 1
            return self._refuse(self.hub.failure)
        if kind == "cdn":
            return self._content(path.rpartition("/")[2], with_body)
        if self.hub.token is not None and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._refuse(401, "RepoNotFound")
        if kind == "api":
            return self._list(path)
        return self._resolve(path, with_body)

    def _list(self, path: str) -> None:
        repo, _, revision = path.removeprefix("/api/models/").partition("/revision/")
        if repo != REPO:
            return self._refuse(404, "RepoNotFound")
        if revision not in ("", "main", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        return self._send(200, json.dumps(self.hub.listing()).encode(), {"Content-Type": "application/json"})

    def _resolve(self, path: str, with_body: bool) -> None:
        name = path.removeprefix(f"/{REPO}/resolve/{COMMIT}/")
        if self.hub.gated:
            return self._refuse(403, "GatedRepo")
        if name not in self.hub.files:
            return self._refuse(404, "EntryNotFound")
        if not name.endswith(".safetensors"):
            return self._content(name, with_body)
        linked = {"X-Linked-ETag": f'"{self.hub.etag(name)}"', "X-Linked-Size": str(len(self.hub.files[name]))}
        etags = {} if self.hub.no_etags else linked
        return self._send(302, b"", {"Location": f"{self.hub.url}/cdn/{name}", "X-Repo-Commit": COMMIT, **etags})

    def _content(self, name: str, with_body: bool) -> None:
        whole = self.hub.files[name]
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and not self.hub.no_ranges else 0
        if asked:
            self.hub.ranges.append(asked)
        headers = {"X-Repo-Commit": COMMIT, **({} if self.hub.no_etags else {"ETag": f'"{self.hub.etag(name)}"'})}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(whole) - 1}/{len(whole)}"
        body = whole[start:]
        self.send_response(206 if start else 200)
        for header, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(header, value)
        self.end_headers()
        if with_body:
            self._write(name, body)

    def _write(self, name: str, body: bytes) -> None:
        if name.endswith(".safetensors") and self.hub.cut is not None and self.hub.cuts > 0:
            self.hub.cuts -= 1
            body = body[: self.hub.cut]
            self.close_connection = True
        if name.endswith(".safetensors") and self.hub.stalled:
            self.wfile.write(body[: 0 if self.headers.get("Range") else len(body) // 2])
            self.wfile.flush()
            self.hub.asked_for_content.set()
            self.hub.resume.wait()
            self.close_connection = True
            return
        self.wfile.write(body)

    def _refuse(self, status: int, code: str = "") -> None:
        self._send(status, b"", {"X-Error-Code": code} if code else {})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for header, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
