"""Files of keys that change while the frontend runs."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.frontend.http.gate import Administration, HttpGate
from components.frontend.http.models import ModelEntry, ModelTable
from components.frontend.keys.known import Found, KeyFile, KeyFiles
from dynamo_local.core.errors import ConfigError
from dynamo_local.core.http.asgi import Receive, Scope, Send
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from tests.unit.frontend.asgi_driver import call, scope

DEADLINE_S = 30.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class Scene:
    """A gate whose two files of keys are followed."""

    def __init__(self, folder: Path) -> None:
        self.plain, self.admin = folder / "keys", folder / "admins"
        self.plain.write_text("first\n")
        self.admin.write_text("master\n")
        self.happened: list[tuple[str, str]] = []
        self.stream_may_end = asyncio.Event()
        self.streaming = 0
        files = KeyFile(self.plain, "api-key-file"), KeyFile(self.admin, "admin-key-file")
        limits = AdmissionLimits()
        self._gate = HttpGate(
            self._app,
            limits=limits,
            models=ModelTable([ModelEntry(["m"], lambda: None, limits, self._app)]),
            is_draining=lambda: False,
            api_keys=files[0].keys,
            administration=Administration(files[1].keys),
        )

        def changed() -> None:
            self._gate.take_keys(files[0].keys, files[1].keys)

        self.files = KeyFiles(files, changed, self._note, look_every_s=0.005, read_within_s=0.05)

    async def _note(self, what: str, why: str) -> None:
        self.happened.append((what, why))

    async def _app(self, asked: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if asked["method"] == "POST":
            self.streaming += 1
            await self.stream_may_end.wait()
        await send({"type": "http.response.body", "body": b"end"})

    async def status(self, key: str, path: str = "/v1/models") -> int | None:
        asked = scope(path, "GET", headers=[("authorization", f"Bearer {key}")])
        return (await call(self._gate, asked)).status

    async def stream(self, key: str) -> bytes:
        asked = scope("/tokenize", "POST", headers=[("authorization", f"Bearer {key}")])
        return (await call(self._gate, asked, [b'{"model": "m"}'])).body

    async def until_told(self, number: int) -> None:
        await until(lambda: len(self.happened) >= number)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path)
    async with following(scene):
        yield scene


@asynccontextmanager
async def following(scene: Scene) -> AsyncIterator[None]:
    task = asyncio.create_task(scene.files.run())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()


async def test_keys_are_replaced_without_a_refused_request(scene: Scene) -> None:
    running = asyncio.create_task(scene.stream("first"))
    await until(lambda: scene.streaming == 1)
    scene.plain.write_text("first\nsecond\n")
    await scene.until_told(1)
    assert [await scene.status(key) for key in ("first", "second", "third")] == [200, 200, 401]
    scene.plain.with_name("new").write_text("second\n")
    scene.plain.with_name("new").replace(scene.plain)
    await scene.until_told(2)
    assert [await scene.status(key) for key in ("first", "second")] == [401, 200]
    scene.stream_may_end.set()
    assert await running == b"end"
    assert scene.happened == [
        ("api-key-file was read anew", "number of keys: 2"),
        ("api-key-file was read anew", "number of keys: 1"),
    ]


async def test_administrators_change_as_well(scene: Scene) -> None:
    scene.admin.write_text("other\n")
    await scene.until_told(1)
    assert [await scene.status(key, "/v1/endpoints") for key in ("master", "first")] == [401, 403]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: path.write_text(""), "holds no key"),
        (lambda path: path.write_text(" \n\n"), "holds no key"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "holds no keys, which are text"),
        (lambda path: path.unlink(), "No such file or directory"),
        (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
        (lambda path: path.write_bytes(b"a" * 2_000_000), "is larger than"),
    ],
)
async def test_a_file_that_holds_no_keys_opens_nothing_and_is_told_once(
    scene: Scene, damage: Callable[[Path], object], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    damage(scene.plain)
    await scene.until_told(1)
    scene.admin.write_text("master\nother\n")
    await scene.until_told(2)
    assert [await scene.status(key) for key in ("", "guess", "first")] == [401, 401, 200]
    ((what, told), _) = scene.happened
    assert what == "api-key-file cannot be used, its former keys stay valid"
    assert why in told
    assert [record.message for record in caplog.records] == [f"{what}: {told}"]
    if scene.plain.is_dir():
        scene.plain.rmdir()
    scene.plain.write_text("second\n")
    await scene.until_told(3)
    assert [await scene.status(key) for key in ("first", "second")] == [401, 200]


async def test_no_key_is_in_the_log(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    scene.plain.write_text("topsecret\n")
    await scene.until_told(1)
    assert "topsecret" not in caplog.text + str(scene.happened)


async def test_a_file_system_that_hangs_holds_nobody_up(scene: Scene) -> None:
    """A pipe in the place of the file: whoever opens it waits for a writer."""
    pipe = scene.plain.with_name("pipe")
    os.mkfifo(pipe)
    pipe.replace(scene.plain)
    await scene.until_told(1)
    assert "takes longer than 0.05 s" in scene.happened[0][1]
    assert [await scene.status(key) for key in ("", "first")] == [401, 200]
    threads = threading.active_count()
    scene.admin.write_text("other\n")
    await scene.until_told(2)
    assert threading.active_count() <= threads + 1
    scene.plain.write_text("second\n")
    scene.plain.unlink()
    scene.plain.write_text("second\n")
    await until(lambda: scene.happened[-1] == ("api-key-file was read anew", "number of keys: 1"))
    assert await scene.status("second") == 200


def test_a_pipe_of_the_shell_is_read_once() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"first\n")
    os.close(writer)
    try:
        file = KeyFile(Path(f"/dev/fd/{reader}"), "api-key-file")
    finally:
        os.close(reader)
    assert (file.keys, file.is_followed) == (("first",), False)


def test_without_a_file_there_are_no_keys_and_an_empty_one_is_refused(tmp_path: Path) -> None:
    assert (KeyFile(None, "api-key-file").keys, KeyFile(None, "api-key-file").is_followed) == ((), False)
    (tmp_path / "keys").touch()
    with pytest.raises(ConfigError, match="holds no key"):
        KeyFile(tmp_path / "keys", "api-key-file")


LOOKS = st.lists(st.sampled_from([("a",), ("b",), ("a", "b"), "it is gone", "it is empty"]), max_size=30)


@given(looks=LOOKS)
def test_keys_are_those_that_were_found_twice_in_a_row_last(
    tmp_path_factory: pytest.TempPathFactory, looks: list[Found]
) -> None:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("a")
    file = KeyFile(path, "api-key-file")
    wanted: Found = ("a",)
    before: Found = wanted
    for found in looks:
        file.take(found)
        if found == before and not isinstance(found, str):
            wanted = found
        before = found
        assert file.keys == wanted
        assert file.keys
