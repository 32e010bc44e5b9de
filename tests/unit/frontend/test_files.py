"""Files over HTTP: what is stored, for whom, and what is refused without leaving anything."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from components.frontend.http.gate import HttpGate
from components.frontend.http.models import ModelTable
from components.frontend.stored.rest import FilesRest
from components.frontend.stored.upload import Uploads
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from dynamo_local.core.http.paths import FILES
from dynamo_local.core.stored.files import FileLimits
from state.files import DISK, Disk
from state.paths import StatePaths
from state.stored.files import FileStore
from tests.unit.frontend.asgi_driver import Answer, Backend, call, scope

LIMITS = FileLimits(max_file_bytes=100, max_files=3)


class Files:
    """A gate with a store behind it."""

    def __init__(self, folder: Path, keys: tuple[str, ...] = (), disk: Disk = DISK) -> None:
        self.paths = StatePaths(folder, "test")
        self.now = 1000.0
        store = FileStore(self.paths, LIMITS, disk)
        rest = FilesRest(store, Uploads(store, LIMITS.max_file_bytes, 10.0, self._clock), self._clock)
        self.gate = HttpGate(
            Backend(),
            limits=AdmissionLimits(max_body_bytes=10),
            models=ModelTable(),
            is_draining=lambda: False,
            api_keys=keys,
            stores={FILES: rest},
        )

    def _clock(self) -> float:
        return self.now

    async def ask(self, method: str, path: str, query: str = "", key: str = "") -> Answer:
        headers = [("authorization", f"Bearer {key}")] if key else []
        return await call(self.gate, scope(path, method, headers, query_string=query.encode()))

    async def upload(self, *parts: tuple[str, str, bytes], pieces: int = 1, **sent: Any) -> Answer:
        """Upload a form of parts (disposition behind its name, header lines, content), in so many pieces."""
        body = form(*parts)
        size = -(-len(body) // pieces)
        cut = [body[begin : begin + size] for begin in range(0, len(body), size)]
        headers = [("content-type", "multipart/form-data; boundary=edge"), ("content-length", str(len(body)))]
        return await call(self.gate, scope("/v1/files", headers=headers), cut, **sent)

    def left(self) -> list[str]:
        """What there is in the store."""
        parts = [f"parts/{path.name}" for path in (self.paths.files_dir / "parts").iterdir()]
        return parts + [path.name for path in self.paths.files_dir.iterdir() if path.name.startswith("file-")]


def form(*parts: tuple[str, str, bytes]) -> bytes:
    body = b""
    for disposition, headers, content in parts:
        head = f"--edge\r\nContent-Disposition: form-data; {disposition}\r\n{headers}\r\n"
        body += head.encode() + content + b"\r\n"
    return body + b"--edge--\r\n"


PURPOSE = ('name="purpose"', "", b"batch")
FILE = ('name="file"; filename="in.jsonl"', "Content-Type: application/octet-stream\r\n", b'{"a":\r\n--edg 1}\n')


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


async def test_a_file_may_be_as_large_as_the_bound_says(files: Files) -> None:
    expires = ('name="expires_after[seconds]"', "", b"2592000")
    stored = await files.upload(PURPOSE, EXPIRES, expires, ('name="file"', "", b"1" * LIMITS.max_file_bytes))
    assert (stored.status, json.loads(stored.body)["bytes"]) == (200, LIMITS.max_file_bytes)


@pytest.mark.parametrize("pieces", [1, 7, 1000])
async def test_a_file_comes_back_as_it_was_sent(files: Files, pieces: int) -> None:
    # Parts in either order, and cut anywhere.
    stored = json.loads((await files.upload(FILE, PURPOSE, pieces=pieces)).body)
    assert {**stored, "id": "file"} == {
        "object": "file",
        "id": "file",
        "filename": "in.jsonl",
        "purpose": "batch",
        "bytes": len(FILE[2]),
        "created_at": 1000,
        "expires_at": 1000 + 30 * 24 * 3600,
        "status": "processed",
        "status_details": None,
    }
    path = f"/v1/files/{stored['id']}"
    assert json.loads((await files.ask("GET", path)).body) == stored
    assert (await files.ask("GET", f"{path}/content")).body == FILE[2]
    assert json.loads((await files.ask("GET", "/v1/files")).body)["data"] == [stored]
    gone = await files.ask("DELETE", path)
    assert json.loads(gone.body) == {"id": stored["id"], "object": "file", "deleted": True}
    assert (await files.ask("GET", f"{path}/content")).status == 404
    assert (await files.ask("DELETE", path)).error["message"] == f"no such file: {stored['id']}"


async def test_lists_have_pages(files: Files) -> None:
    made = []
    for files.now in (1.0, 2.0, 3.0):
        made.append(json.loads((await files.upload(PURPOSE, FILE)).body)["id"])
    first = json.loads((await files.ask("GET", "/v1/files", "limit=2")).body)
    assert ([file["id"] for file in first["data"]], first["has_more"]) == ([made[2], made[1]], True)
    rest = json.loads((await files.ask("GET", "/v1/files", f"limit=2&after={first['last_id']}")).body)
    assert ([file["id"] for file in rest["data"]], rest["has_more"]) == ([made[0]], False)
    oldest = json.loads((await files.ask("GET", "/v1/files", "order=asc&limit=1")).body)
    assert oldest["last_id"] == made[0]
    assert json.loads((await files.ask("GET", "/v1/files", "purpose=batch_output")).body)["data"] == []
    for query in ("limit=0", "limit=x", "order=up", "other=1"):
        assert (await files.ask("GET", "/v1/files", query)).status == 400


EXPIRES = ('name="expires_after[anchor]"', "", b"created_at")


@pytest.mark.parametrize(
    ("parts", "status", "message"),
    [
        ([PURPOSE], 400, "the form has no file"),
        ([FILE], 400, "purpose must be one of batch, user_data, got 'none'"),
        ([('name="purpose"', "", b"assistants"), FILE], 400, "purpose must be"),
        ([PURPOSE, FILE, FILE], 400, "a form has one file"),
        ([PURPOSE, ("x", "", b""), FILE], 400, "has no name"),
        ([PURPOSE, ('name="other"', "", b"1"), FILE], 400, "there is no field 'other'"),
        ([PURPOSE, ('name="other"', "", b"1" * 1025), FILE], 400, "longer than 1024 bytes"),
        ([PURPOSE, *[('name="a"', "", b"")] * 16, FILE], 400, "at most 16 parts"),
        ([PURPOSE, EXPIRES, ('name="expires_after[seconds]"', "", b"60"), FILE], 400, "3600 to 2592000, got 60"),
        ([PURPOSE, ('name="expires_after[seconds]"', "", b"9" * 400), FILE], 400, "anchor of expires_after"),
        ([PURPOSE, ('name="file"', "", b"1" * 101)], 413, "larger than 100 bytes (setting max-file-bytes)"),
    ],
)
async def test_what_is_refused_leaves_nothing(
    files: Files, parts: list[tuple[str, str, bytes]], status: int, message: str
) -> None:
    refused = await files.upload(*parts, pieces=5)
    assert refused.status == status
    assert message in refused.error["message"]
    assert files.left() == []


GARBAGE = [
    b"",
    b"\xff\xfe" + bytes(range(256)),
    form(PURPOSE, FILE).replace(b"--edge\r", b"--other\r"),
    form(PURPOSE, FILE).replace(b"\r\n", b"\n"),
    form(PURPOSE, FILE).replace(b"Content-Disposition", b"Content\0Disposition"),
    form(PURPOSE, FILE).replace(b"Content-Disposition:", b":"),
    form(PURPOSE, FILE).replace(b"name=", b"name*=utf-16''"),
    b"--edge\r\n" + b"a" * 100_000,
    b"--edge\r\n" + b"a: b\r\n" * 1000,
]


@pytest.mark.parametrize("body", GARBAGE, ids=range(len(GARBAGE)))
async def test_a_form_that_is_none_is_refused_and_not_logged(
    files: Files, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    for kind in ("edge", '"edge', "e" * 300, "edge; boundary*=x", ""):
        headers = [("content-type", f"multipart/form-data; boundary={kind}")]
        answer = await call(files.gate, scope("/v1/files", headers=headers), [body])
        assert (answer.status, answer.error["type"]) == (400, "BadRequestError")
    assert (caplog.records, files.left()) == ([], [])


async def test_an_upload_that_breaks_off_leaves_nothing(files: Files) -> None:
    gone = await files.upload(PURPOSE, FILE, pieces=5, hang_up=True)
    assert gone.status is None
    headers = [("content-type", "multipart/form-data; boundary=edge")]
    cut = await call(files.gate, scope("/v1/files", headers=headers), [form(PURPOSE, FILE)[:-6]])
    assert cut.error["message"] == "the form is not whole: its last boundary is missing"
    assert (await call(files.gate, scope("/v1/files"), [b"{}"])).status == 400
    assert files.left() == []


class FullDisk(Disk):
    def __init__(self) -> None:
        self.is_full = False

    def write(self, descriptor: int, data: bytes) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(descriptor, data)


async def test_a_full_disk_is_told_and_what_was_there_stays(tmp_path: Path) -> None:
    disk = FullDisk()
    files = Files(tmp_path, disk=disk)
    stored = json.loads((await files.upload(PURPOSE, FILE)).body)
    disk.is_full = True
    refused = await files.upload(PURPOSE, FILE)
    assert (refused.status, refused.error["type"]) == (507, "InsufficientStorageError")
    assert "disk is full" in refused.error["message"]
    assert refused.headers["x-should-retry"] == "false"
    assert files.left() == [stored["id"]]
    assert (await files.ask("GET", f"/v1/files/{stored['id']}/content")).body == FILE[2]


async def test_a_quota_is_told(files: Files) -> None:
    for _ in range(3):
        await files.upload(PURPOSE, FILE)
    refused = await files.upload(PURPOSE, FILE)
    assert refused.status == 507
    assert "setting max-files" in refused.error["message"]


async def test_without_a_key_nobody_comes_near(tmp_path: Path) -> None:
    files = Files(tmp_path, ("secret",))
    for method, path in (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", f"/v1/files/file-{'0' * 24}/content")):
        assert (await files.ask(method, path)).status == 401
    assert (await files.ask("GET", "/v1/files", key="secret")).status == 200
    assert (await files.ask("PUT", "/v1/files", key="secret")).status == 405
    assert (await files.ask("GET", "/v1/files/a/b", key="secret")).status == 404


async def test_a_store_of_a_newer_release_is_refused(files: Files) -> None:
    await files.upload(PURPOSE, FILE)
    (files.paths.files_dir / "store.json").write_text('{"schema_version": 9}')
    fresh = Files(files.paths.root)
    assert (await fresh.ask("GET", "/v1/files")).status == 503
    assert "has version 9" in (await fresh.upload(PURPOSE, FILE)).error["message"]
