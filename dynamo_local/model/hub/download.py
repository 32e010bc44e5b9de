"""Downloads files of the hub into its cache: several at a time, going on where an earlier download ended.

A file's content grows in a partial file named after its ETag, and gets its final name once its size and, where the
ETag is one, its SHA-256 are right.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from dynamo_local.core.errors import FetchError
from dynamo_local.model.hub.cache import CachedModel
from dynamo_local.model.hub.errors import may_pass
from dynamo_local.model.hub.progress import DownloadProgress, Steps, megabytes

if TYPE_CHECKING:
    import httpx2

    from dynamo_local.model.hub.hub import HubSettings

_AT_A_TIME = 4
_CHUNK_BYTES = 1 << 20
_LOOK_EVERY_S = 0.1
_SHA256 = re.compile(r"[0-9a-f]{64}")


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


@dataclass(frozen=True)
class Wanted:
    """A file to get: its name in the model, its address, its size in bytes if known."""

    name: str
    url: str
    size: int | None


class _CutError(Exception):
    """A connection ended before the whole file had come."""


class _StoppedError(Exception):
    """The download is given up: another file has failed, or the user has interrupted it."""


class Download:
    """Gets files of one model at one commit into the cache."""

    def __init__(self, settings: HubSettings, cached: CachedModel, commit: str) -> None:
        self._settings = settings
        self._cached = cached
        self._commit = commit
        self._stop = threading.Event()
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._failures: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self._done: dict[str, int] = {}

    def run(self, files: Sequence[Wanted], what: str, report: Steps) -> None:
        """Get all files, showing the progress. Raises the first error; what has come is kept for the next time."""
        left: queue.SimpleQueue[Wanted] = queue.SimpleQueue()
        for file in files:
            left.put(file)
        # Daemon threads: Ctrl-C must not wait for a connection that is silent.
        threads = [
            threading.Thread(target=self._work, args=(left,), name=f"download-{n}", daemon=True)
            for n in range(min(_AT_A_TIME, len(files)))
        ]
        total = sum(file.size or 0 for file in files)
        # A line that is renewed is for one download: those in other threads report lines.
        is_main = threading.current_thread() is threading.main_thread()
        terminal = sys.stderr if is_main and sys.stderr.isatty() else None
        progress = DownloadProgress(what, total, report, terminal, time.monotonic)
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                self._show(progress)
                if not self._failures.empty():
                    break
                threads[0].join(_LOOK_EVERY_S) if threads[0].is_alive() else time.sleep(_LOOK_EVERY_S)
            self._show(progress)
        finally:
            self._stop.set()
            progress.close()
        if not self._failures.empty():
            raise self._failures.get()
        report.step(f"{what}: {megabytes(sum(self._done.values()))} fetched")

    def _show(self, progress: DownloadProgress) -> None:
        while not self._notes.empty():
            progress.note(self._notes.get())
        progress.update(sum(self._done.values()))

    def _work(self, left: queue.SimpleQueue[Wanted]) -> None:
        while not self._stop.is_set():
            try:
                file = left.get_nowait()
            except queue.Empty:
                return
            try:
                self._get(file)
            except _StoppedError:
                return
            except Exception as error:  # noqa: BLE001 - raised in the thread that waits
                self._failures.put(error)
                return

    def _get(self, file: Wanted) -> None:
        """Get a file, trying again while the network fails and some bytes come between the failures."""
        failed = 0
        while True:
            before = self._done.get(file.name, 0)
            try:
                return self._try(file)
            except Exception as error:
                if not (isinstance(error, _CutError) or may_pass(error)):
                    raise
                failed = 1 if self._done.get(file.name, 0) > before else failed + 1
                if failed >= self._settings.tries:
                    if isinstance(error, _CutError):
                        raise FetchError(str(error), "try again: what has come is kept") from error
                    raise
                self._wait(file, error, failed)

    def _wait(self, file: Wanted, error: Exception, failed: int) -> None:
        self._notes.put(f"{file.name}: {_reason(error)}; trying again ({failed} of {self._settings.tries - 1})")
        if self._stop.wait(self._settings.pause_s * 2 ** (failed - 1)):
            raise _StoppedError

    def _try(self, file: Wanted) -> None:
        etag, size = self._look_up(file)
        if not self._cached.blob(etag).is_file():
            with self._locked_partial(etag) as partial:
                # Another process may have finished it while this one waited for the lock.
                if not self._cached.blob(etag).is_file():
                    self._fill(file, partial, etag, size)
                    self._cached.partial(etag).replace(self._cached.blob(etag))
        self._cached.partial(etag).unlink(missing_ok=True)  # of a process that came too late to fill it
        self._done[file.name] = self._cached.blob(etag).stat().st_size
        self._cached.link(self._commit, file.name, etag)

    def _look_up(self, file: Wanted) -> tuple[str, int | None]:
        """The file's ETag, which names its content, and its size."""
        from huggingface_hub import get_hf_file_metadata

        found = get_hf_file_metadata(
            file.url,
            token=self._settings.token or False,
            timeout=self._settings.silence_s,
            endpoint=self._settings.endpoint,
        )
        if not found.etag or "/" in found.etag:
            raise FetchError(
                f"{self._settings.endpoint} gives no ETag for {file.name}", "check HF_ENDPOINT: it is no hub of models"
            )
        if file.size is not None and found.size is not None and file.size != found.size:
            raise FetchError(
                f"{file.name} has {found.size:,} bytes on the hub, whose list says {file.size:,}", "try again later"
            )
        return found.etag, found.size if found.size is not None else file.size

    @contextmanager
    def _locked_partial(self, etag: str) -> Iterator[BinaryIO]:
        """The partial file, open for this process alone. Waits for another that has it."""
        path = self._cached.partial(etag)
        told = False
        while not self._stop.is_set():
            with path.open("ab+") as partial:
                try:
                    fcntl.flock(partial, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if not told:
                        self._notes.put("another process fetches the same model: waiting for it")
                    told = True
                    self._stop.wait(_LOOK_EVERY_S)
                    continue
                if self._cached.blob(etag).is_file() or _is_same(partial, path):
                    yield partial
                    return
        raise _StoppedError

    def _fill(self, file: Wanted, partial: BinaryIO, etag: str, size: int | None) -> None:
        """Get what the partial file lacks, and check the whole."""
        digest: _Digest | None = hashlib.sha256() if _SHA256.fullmatch(etag) else None
        have = self._reuse(file, partial, size, digest)
        if size is None or have < size:
            digest = self._stream(file, partial, digest, have)
        have = partial.tell()
        if size is not None and have < size:
            raise _CutError(f"{file.name} ended after {have:,} of {size:,} bytes")
        if (size is not None and have > size) or (digest is not None and digest.hexdigest() != etag):
            partial.truncate(0)
            raise FetchError(f"{file.name} is not what the hub announced (its size or SHA-256)", "try again")
        os.fsync(partial.fileno())

    def _reuse(self, file: Wanted, partial: BinaryIO, size: int | None, digest: _Digest | None) -> int:
        """Take what an earlier download has left, and return how many bytes that is."""
        if size is None:
            partial.truncate(0)
        partial.seek(0)
        self._done[file.name] = 0
        while digest is not None and (chunk := partial.read(_CHUNK_BYTES)):
            if self._stop.is_set():
                raise _StoppedError
            digest.update(chunk)
            self._done[file.name] += len(chunk)
        self._done[file.name] = have = partial.seek(0, os.SEEK_END)
        return have

    def _stream(self, file: Wanted, partial: BinaryIO, digest: _Digest | None, have: int) -> _Digest | None:
        """Append what comes; returns the digest of the whole, which is a new one if the server starts over."""
        import httpx2
        from huggingface_hub import get_session, hf_raise_for_status

        headers = {"Accept-Encoding": "identity"}
        if self._settings.token:
            headers["Authorization"] = f"Bearer {self._settings.token}"
        if have:
            headers["Range"] = f"bytes={have}-"
        timeout = httpx2.Timeout(self._settings.silence_s)
        with get_session().stream("GET", file.url, headers=headers, timeout=timeout, follow_redirects=True) as response:
            hf_raise_for_status(response)
            if have and response.status_code != httpx2.codes.PARTIAL_CONTENT:
                partial.truncate(0)
                self._done[file.name] = 0
                digest = hashlib.sha256() if digest is not None else None
            self._append(file, partial, digest, response)
        return digest

    def _append(self, file: Wanted, partial: BinaryIO, digest: _Digest | None, response: httpx2.Response) -> None:
        for chunk in response.iter_raw():
            if self._stop.is_set():
                raise _StoppedError
            partial.write(chunk)
            partial.flush()  # what has come survives the process
            if digest is not None:
                digest.update(chunk)
            self._done[file.name] += len(chunk)


def _is_same(file: BinaryIO, path: Path) -> bool:
    """Whether the open file is still the one of that name: its last owner may have given it its final name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _reason(error: Exception) -> str:
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    match error:
        case HfHubHTTPError():
            return f"the hub answers with status {error.response.status_code}"
        case httpx2.TimeoutException():
            return "no byte has come for a while"
        case _CutError():
            return "the connection was cut"
    return f"the connection failed ({type(error).__name__})"
