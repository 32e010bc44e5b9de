"""Downloads files of the hub into its cache: with progress in words, and with errors of its library and of the network
as ours. Several at a time, going on where an earlier download ended."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import queue
import re
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, TextIO

from dynamo_local.core.errors import DynamoError, FetchError, UsageError
from dynamo_local.model.hub.cache import CachedModel

if TYPE_CHECKING:
    import httpx2

    from dynamo_local.model.hub.hub import HubModel, HubSettings


# How far a download is, in words: a line that renews itself on a terminal, else a line every few seconds.

MB = 1_000_000
RATE_WINDOW_S = 5.0
LINE_EVERY_S = 2.5
_BAR_CELLS = 20
_ERASE = "\r\x1b[K"


class Steps(Protocol):
    """Shows lines. Part of `dynamo_local.supervisor.server.reports.report.Report`."""

    def step(self, text: str) -> None: ...


class Rate:
    """Bytes a second over the last seconds, from totals given with their times."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, now: float, total_bytes: int) -> None:
        self._samples.append((now, total_bytes))
        # The sample before the window stays, so that the window is covered whole.
        while len(self._samples) > 2 and self._samples[1][0] <= now - self._window_s:
            self._samples.popleft()

    def bytes_per_s(self) -> float | None:
        """None while there is nothing to compare."""
        if len(self._samples) < 2:
            return None
        (start, first), (end, last) = self._samples[0], self._samples[-1]
        return (last - first) / (end - start) if end > start else None


class DownloadProgress:
    """Shows the progress of one download. `terminal`: the stream to renew a line on, None to report lines."""

    def __init__(
        self, what: str, total_bytes: int, report: Steps, terminal: TextIO | None, clock: Callable[[], float]
    ) -> None:
        self._what = what
        self._total = total_bytes
        self._report = report
        self._terminal = terminal
        self._clock = clock
        self._rate = Rate()
        self._shown_at = clock()
        self._moved_at = clock()
        self._done: int | None = None

    def update(self, done_bytes: int) -> None:
        """Take the number of bytes there so far; show it if it is time to."""
        now = self._clock()
        if done_bytes != self._done:
            self._done, self._moved_at = done_bytes, now
        self._rate.add(now, done_bytes)
        text = progress_text(done_bytes, self._total, self._rate.bytes_per_s(), now - self._moved_at)
        if self._terminal is not None:
            self._renew(f"{bar(done_bytes, self._total)} {self._what}: {text}")
        elif now - self._shown_at >= LINE_EVERY_S:
            self._shown_at = now
            self._report.step(f"{self._what}: {text}")

    def note(self, text: str) -> None:
        """Show a line of its own, such as the reason of a delay."""
        self.close()
        self._report.step(text)

    def close(self) -> None:
        """Take the line from the terminal."""
        self._write(_ERASE)

    def _renew(self, text: str) -> None:
        columns = shutil.get_terminal_size().columns
        self._write(_ERASE + text[: columns - 1])

    def _write(self, text: str) -> None:
        if self._terminal is None:
            return
        try:
            self._terminal.write(text)
            self._terminal.flush()
        except OSError:
            self._terminal = None  # the terminal has gone; the download need not


def progress_text(done_bytes: int, total_bytes: int, bytes_per_s: float | None, silent_s: float) -> str:
    """For example "612 of 1,503 MB (40 %), 42 MB/s, 21 s left"."""
    share = f" ({100 * done_bytes // total_bytes} %)" if total_bytes else ""
    parts = [f"{done_bytes // MB:,} of {megabytes(total_bytes)}{share}"]
    if silent_s >= RATE_WINDOW_S:
        parts.append(f"no byte for {silent_s:.0f} s")
    elif bytes_per_s:
        parts += [f"{bytes_per_s / MB:.{0 if bytes_per_s >= 10 * MB else 1}f} MB/s"]
        parts += [f"{duration((total_bytes - done_bytes) / bytes_per_s)} left"]
    return ", ".join(parts)


def bar(done: int, total: int) -> str:
    """For example "[========            ]"."""
    filled = _BAR_CELLS * done // total if total else 0
    return f"[{'=' * filled}{' ' * (_BAR_CELLS - filled)}]"


def megabytes(size: int) -> str:
    """For example "1,503 MB". Rounded up: a file takes room."""
    return f"{-(-size // MB):,} MB"


def duration(seconds: float) -> str:
    """For example "21 s", "3 min 20 s", "2 h 05 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


# Errors of the hub's library and of the network as ours, each with its cause and remedy.

RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})


def as_ours(error: Exception, model: HubModel, settings: HubSettings) -> DynamoError:
    """The error to show for one that was met while a model was fetched."""
    import httpx2
    from huggingface_hub import errors

    match error:
        case DynamoError():
            return error
        case errors.HfHubHTTPError():
            return _refusal(error, model, settings)
        case errors.OfflineModeIsEnabled():
            return offline_without(model, settings)
        case httpx2.TimeoutException():
            return FetchError(
                f"{settings.host} has not answered for {settings.silence_s:g} s", "check the network, then try again"
            )
        case httpx2.RemoteProtocolError() | httpx2.ReadError():
            return FetchError(f"the connection to {settings.host} was cut", "try again: what has come is kept")
        case httpx2.HTTPError() | httpx2.InvalidURL():
            return _unreachable(error, settings)
        case errors.HFValidationError() | errors.HfUriError():
            return UsageError(f"{model} is no id of a model", "write ORG/NAME or ORG/NAME@REVISION, or name a folder")
        case OSError():
            return _of_disk(error, settings)
    return FetchError(f"{model} could not be fetched ({type(error).__name__}: {_first_line(error)})", "try again")


def may_pass(error: Exception) -> bool:
    """Whether the same request may succeed a little later."""
    import httpx2
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code in RETRIED_STATUSES
    return isinstance(error, httpx2.TransportError) and not isinstance(error, httpx2.UnsupportedProtocol)


def is_out_of_reach(error: Exception) -> bool:
    """Whether the hub could not be reached or is not working, so that a copy in the cache is to be used."""
    return may_pass(error)


def offline_without(model: HubModel, settings: HubSettings) -> UsageError:
    return UsageError(
        f"HF_HUB_OFFLINE is set, and {model} is not whole in the cache {settings.cache}",
        "unset it once with a network, or name a folder with the model",
    )


def _refusal(error: Exception, model: HubModel, settings: HubSettings) -> DynamoError:
    """The hub answered, with an error."""
    from huggingface_hub import errors

    assert isinstance(error, errors.HfHubHTTPError)
    host = settings.host
    match error:
        case errors.GatedRepoError():
            page = f"{settings.endpoint}/{model.repo}"
            token = (
                "with the account of your token" if settings.token else "and set HF_TOKEN to a token of your account"
            )
            return UsageError(f"{model} is gated, and you have no access yet", f"accept its terms at {page} {token}")
        case errors.RevisionNotFoundError():
            return UsageError(f"{model.repo} has no revision {model.revision!r}", "name a branch, a tag or a commit")
        case errors.RepositoryNotFoundError():
            return _no_such_model(model, settings)
        case errors.DisabledRepoError():
            return UsageError(f"{host} has disabled {model}", "choose another model")
    status = error.response.status_code
    if status in (401, 403):
        return UsageError(f"{host} refuses the token in HF_TOKEN (status {status})", "make one that may read models")
    if status == 429:
        return FetchError(f"{host} answers that there were too many requests", "wait some minutes, or set HF_TOKEN")
    if status >= 500:
        return FetchError(f"{host} fails with status {status}", "try again later")
    return FetchError(f"{host} answers with status {status} when asked for {model}", "try again later")


def _no_such_model(model: HubModel, settings: HubSettings) -> UsageError:
    private = "your token may not read it" if settings.token else "a private model needs a token in HF_TOKEN"
    if "/" not in model.repo:
        return UsageError(
            f"{model} is neither a folder nor a model on {settings.host}",
            "write ORG/NAME for a model of the hub, or the path of a folder",
        )
    return UsageError(f"there is no model {model} on {settings.host}", f"check the spelling; {private}")


def _unreachable(error: Exception, settings: HubSettings) -> FetchError:
    return FetchError(
        f"{settings.host} cannot be reached ({_first_line(error) or type(error).__name__})",
        "check the network and HTTPS_PROXY, set HF_ENDPOINT to a mirror, or name a folder with the model",
    )


def _of_disk(error: OSError, settings: HubSettings) -> DynamoError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FetchError(
            f"the disk of {settings.cache} is full; what was fetched is kept", "free room there, or set HF_HOME"
        )
    return FetchError(f"the model cannot be written to {settings.cache} ({_first_line(error)})", "set HF_HOME")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


# Downloads files of the hub into its cache: several at a time, going on where an earlier download ended.
#
# A file's content grows in a partial file named after its ETag, and gets its final name once its size and, where the
# ETag is one, its SHA-256 are right.

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
