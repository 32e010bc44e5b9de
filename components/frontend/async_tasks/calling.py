"""Makes the attempts of callbacks: the host is looked up once, and called by the address that was found."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple
from weakref import WeakValueDictionary

from dynamo_local.core.async_tasks.callbacks import (
    CallbackLimits,
    Target,
    chosen,
    headers_of,
    is_address,
    is_delivered,
    is_last,
    networks_of,
    payload_of,
    secret_of,
    target_of,
)
from dynamo_local.core.async_tasks.records import Task
from dynamo_local.core.errors import ConfigError, one_line
from dynamo_local.tasks import finish_in_thread

_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])(?: [^\r\n]*)?\r?\n")
_MAX_LINE_BYTES = 8192
_LOOK_UPS_AT_ONCE, _OF_OWNER = 64, 4
"""Look-ups at the same time, and those of one owner."""

_MAX_INTERIM_LINES = 200
"""Of answers that precede the one that counts (status 1xx)."""


class CallError(Exception):
    """The receiver could not be asked, or has not answered."""


class Attempt(NamedTuple):
    """What came of an attempt. `is_last`: no further one is to be made, whatever came of this one."""

    outcome: str
    is_delivered: bool
    is_last: bool


class LookUps:
    """Looks hosts up in threads of its own: one that takes long holds up other look-ups alone, and no exit."""

    def __init__(self) -> None:
        self._rooms = WeakValueDictionary[str, asyncio.Semaphore]()
        self._threads = 0

    async def find(self, owner: str, target: Target) -> list[str]:
        """Return the addresses of a host, for a task of this owner. To be called with a deadline. Raises CallError."""
        if is_address(target.host):
            return [target.host]
        room = self._rooms.setdefault(owner, asyncio.Semaphore(_OF_OWNER))
        await room.acquire()
        if self._threads >= _LOOK_UPS_AT_ONCE:
            room.release()
            raise CallError(f"{target.host[:60]} cannot be looked up now: {self._threads} look-ups take their time")
        self._threads += 1
        try:
            return await self._in_thread(target, room)
        except RuntimeError as error:
            # No thread could be started.
            self._done(room)
            raise CallError(f"{target.host[:60]} cannot be looked up now: {error}") from error

    def _done(self, room: asyncio.Semaphore) -> None:
        self._threads -= 1
        room.release()

    async def _in_thread(self, target: Target, room: asyncio.Semaphore) -> list[str]:
        """Look a host up. Raises CallError; RuntimeError: the thread could not be started."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[list[str]] = loop.create_future()

        def done(addresses: list[str], error: Exception | None) -> None:
            self._done(room)
            if found.done():
                return
            if error is None:
                found.set_result(addresses)
            else:
                found.set_exception(CallError(f"{target.host[:60]} cannot be found: {error}"))

        def look() -> None:
            addresses: list[str] = []
            failure: Exception | None = None
            try:
                answers = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
                # Without the zone of an address that holds on one link alone.
                addresses = [str(each[4][0]).partition("%")[0] for each in answers]
            except (OSError, UnicodeError) as error:
                failure = error
            # The loop may have ended meanwhile.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(done, addresses, failure)

        threading.Thread(target=look, name=f"look-up of {target.host[:60]}", daemon=True).start()
        return await found


class Calling:
    """Calls receivers. `secret`: of the server; blocks. `wall_clock`: what attempts are dated by."""

    def __init__(self, limits: CallbackLimits, secret: Callable[[], bytes], wall_clock: Callable[[], float]) -> None:
        """Raises ConfigError."""
        self._allowed = networks_of(limits.callback_allow)
        self._timeout_s = limits.callback_timeout_s
        self._secret = secret
        self._wall_clock = wall_clock
        self._look_ups = LookUps()

    async def check(self, owner: str, url: str) -> None:
        """Check that a callback of this owner may go there. Raises ConfigError, which says why not."""
        target = target_of(url)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._resolve(owner, target)
        except TimeoutError as error:
            raise ConfigError(f"callback_url: {target.host[:60]} was not found within {self._timeout_s:g} s") from error
        except CallError as error:
            raise ConfigError(f"callback_url: {error}") from error

    async def attempt(self, owner: str, task: Task) -> Attempt:
        """Tell the receiver the result, once. Raises StateError: the secret cannot be read."""
        payload = await finish_in_thread(partial(payload_of, task))
        secret = secret_of(await finish_in_thread(self._secret), owner)
        headers = headers_of(task, payload, secret, self._wall_clock())
        try:
            async with asyncio.timeout(self._timeout_s):
                target = target_of(task.head.callback_url)
                status = await post(target, await self._resolve(owner, target), headers, payload)
        except TimeoutError:
            return Attempt(f"no answer within {self._timeout_s:g} s", False, False)
        except (CallError, ConfigError) as error:
            return Attempt(one_line(error), False, False)
        return Attempt(f"status {status}", is_delivered(status), is_last(status))

    async def _resolve(self, owner: str, target: Target) -> str:
        """Return the address to call. Raises ConfigError, CallError."""
        return chosen(target.host, await self._look_ups.find(owner, target), self._allowed)


async def post(target: Target, address: str, headers: Mapping[str, str], body: bytes) -> int:
    """Send a request to this address, and return the status of the answer, of which no more is read. No redirect is
    followed, and no proxy asked. To be called with a deadline. Raises CallError."""
    context = await asyncio.to_thread(ssl.create_default_context) if target.is_tls else None
    name = target.host if target.is_tls else None
    try:
        reader, writer = await asyncio.open_connection(
            address, target.port, ssl=context, server_hostname=name, limit=_MAX_LINE_BYTES
        )
    except (OSError, ssl.SSLError) as error:
        raise CallError(f"cannot connect: {one_line(error)}") from error
    try:
        writer.write(_head(target, headers, len(body)))
        writer.write(body)
        await writer.drain()
        return await _status(reader)
    except (OSError, ssl.SSLError, ValueError, asyncio.IncompleteReadError) as error:
        raise CallError(f"no answer: {one_line(error)}") from error
    finally:
        writer.transport.abort()


def _head(target: Target, headers: Mapping[str, str], length: int) -> bytes:
    host = target.origin.partition("://")[2]
    lines = [f"POST {target.path} HTTP/1.1", f"host: {host}", f"content-length: {length}", "connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("ascii")


async def _status(reader: asyncio.StreamReader) -> int:
    """Return the status that counts. Raises ValueError: that is no HTTP, or too much before it."""
    lines = 0
    while lines < _MAX_INTERIM_LINES:
        found = _STATUS.fullmatch(await reader.readline())
        if found is None:
            raise ValueError("the answer is no HTTP/1.1")
        status = int(found[1])
        if status >= 200:
            return status
        while (await reader.readline()).strip() and lines < _MAX_INTERIM_LINES:
            lines += 1
        lines += 1
    raise ValueError("the answer does not come to its end")
