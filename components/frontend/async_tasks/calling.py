"""Makes the attempts of callbacks: the host is looked up once, and called by the address that was found."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from dynamo_local.core.async_tasks.callbacks import (
    CallbackLimits,
    Target,
    chosen,
    headers_of,
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
_MAX_INTERIM_LINES = 200
"""Of answers that precede the one that counts (status 1xx)."""


class CallError(Exception):
    """The receiver could not be asked, or has not answered."""


class Attempt(NamedTuple):
    """What came of an attempt. `is_last`: no further one is to be made, whatever came of this one."""

    outcome: str
    is_delivered: bool
    is_last: bool


class Calling:
    """Calls receivers. `secret`: of the server; blocks. `wall_clock`: what attempts are dated by."""

    def __init__(self, limits: CallbackLimits, secret: Callable[[], bytes], wall_clock: Callable[[], float]) -> None:
        """Raises ConfigError."""
        self._allowed = networks_of(limits.callback_allow)
        self._timeout_s = limits.callback_timeout_s
        self._secret = secret
        self._wall_clock = wall_clock

    async def check(self, url: str) -> None:
        """Check that a callback may go there. Raises ConfigError, which says why not."""
        target = target_of(url)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._resolve(target)
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
                status = await post(target, await self._resolve(target), headers, payload)
        except TimeoutError:
            return Attempt(f"no answer within {self._timeout_s:g} s", False, False)
        except (CallError, ConfigError) as error:
            return Attempt(one_line(error), False, False)
        return Attempt(f"status {status}", is_delivered(status), is_last(status))

    async def _resolve(self, target: Target) -> str:
        """Return the address to call. Raises ConfigError, CallError."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise CallError(f"{target.host[:60]} cannot be found: {error}") from error
        # Without the zone of an address that holds on one link alone.
        return chosen(target.host, [str(each[4][0]).partition("%")[0] for each in found], self._allowed)


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
