"""The server's side of endpoint calls. The protocol is in messages.py."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.rpc.messages import (
    BEAT_S,
    MAX_CALLS,
    SILENT_BEATS,
    WINDOW,
    Alive,
    Begin,
    Control,
    Credit,
    Done,
    Failed,
    Refused,
    Reply,
    Taken,
)
from dynamo_local.bus.subscriptions import Answer, Subscription
from dynamo_local.core.beats import until_beat
from dynamo_local.core.errors import BusError, DynamoError, RpcError
from dynamo_local.core.subjects import Subjects
from dynamo_local.sdk.service import EndpointSpec, spec_of
from dynamo_local.sdk.signatures import request_type
from dynamo_local.tasks import TaskGuard

_log = logging.getLogger(__name__)

_QUEUE = "instances"
"""Queue group: each call is delivered to one instance of a service."""
_OVERHEAD_BYTES = 1024
_MAX_ERROR_CHARS = 1000
_CANCEL_DEADLINE_S = 2.0


@dataclass
class _ServedCall:
    """A call being served. `sent` counts its frames, `replies` the replies among them, `read` the replies read."""

    name: str
    caller: Answer
    task: asyncio.Task[None] | None = None
    sent: int = 0
    replies: int = 0
    read: int = 0
    silent_beats: int = 0
    hung_up: bool = False
    credited: asyncio.Event = field(default_factory=asyncio.Event)

    def hang_up(self) -> None:
        """Cancel the work: the caller does not wait for it any more."""
        self.hung_up = True
        if self.task is not None:
            self.task.cancel()


class CallServer:
    """Serves the endpoints of one service object. Call `start()`, keep `run()` running, and end with `stop()`."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        tasks: TaskGuard,
        *,
        beat_s: float = BEAT_S,
        max_calls: int = MAX_CALLS,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._tasks = tasks
        self._beat_s = beat_s
        self._max_calls = max_calls
        self._calls: dict[str, _ServedCall] = {}
        self._subscriptions: list[Subscription] = []
        self._stopping = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def calls(self) -> int:
        """Number of calls being served."""
        return len(self._calls)

    async def start(self, instance: object) -> None:
        """Take calls of the object's endpoints, which are shared with the other instances of its service."""
        spec = spec_of(type(instance))
        for endpoint in spec.endpoints.values():
            subject = self._subjects.call(spec.name, endpoint.name)
            handler = self._handler(instance, endpoint)
            self._subscriptions.append(await self._bus.serve(subject, Begin, handler, queue=_QUEUE))
        await self._bus.flush()

    async def run(self) -> None:
        """Send a beat for each call, and end calls whose caller is silent, until cancelled."""
        while True:
            await asyncio.sleep(until_beat(time.monotonic(), self._beat_s))
            for call in list(self._calls.values()):
                call.silent_beats += 1
                if call.silent_beats > SILENT_BEATS:
                    _log.warning("a call of %s is ended: its caller has ended, or does not answer", call.name)
                    call.hang_up()
                else:
                    await call.caller.send(Alive(call.sent))

    async def stop(self, deadline_s: float) -> None:
        """Take no more calls, let those under way finish, and cancel those that have not after `deadline_s`.

        Calls that still come are refused, not ignored, so that their callers try another instance.
        """
        self._stopping = True
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        except TimeoutError:
            _log.warning("%d calls were still under way after %g s, and are cancelled", len(self._calls), deadline_s)
        tasks = [call.task for call in self._calls.values() if call.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_DEADLINE_S)
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    def _handler(self, instance: object, endpoint: EndpointSpec) -> Callable[[Begin, Answer], Awaitable[None]]:
        cls = type(instance)
        name = f"{spec_of(cls).name}.{endpoint.name}"
        method = getattr(instance, endpoint.method)
        decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(request_type(cls, endpoint))

        async def on_begin(begin: Begin, caller: Answer) -> None:
            if self._stopping or len(self._calls) >= self._max_calls:
                await caller.send(Refused("it is stopping" if self._stopping else "it is at its limit of calls"))
                return
            call = _ServedCall(name, caller)
            self._calls[begin.call_id] = call
            self._idle.clear()

            def start() -> Any:
                return method(_decode(decoder, begin.request)) if endpoint.takes_request else method()

            call.task = self._tasks.spawn(f"call {name}", self._serve(begin.call_id, call, start, endpoint.streams))
            # Not in the task's own code, which never runs if the task is cancelled before its first step.
            call.task.add_done_callback(lambda _: self._forget(begin.call_id))

        return on_begin

    async def _serve(self, call_id: str, call: _ServedCall, start: Callable[[], Any], streams: bool) -> None:
        async def on_control(message: Control) -> None:
            self._on_control(call, message)

        control: Subscription | None = None
        try:
            control = await self._bus.listen(self._subjects.call_control(call_id), Control, on_control)
            await call.caller.send(Taken())
            last = await self._answer(call, start, streams)
            await call.caller.send(last)
        except asyncio.CancelledError:
            if call.hung_up:
                return
            await call.caller.send(Failed(call.sent, "its process is stopping"))
            raise
        except BusError as error:
            _log.warning("a call of %s cannot be served: %s", call.name, error)
        finally:
            if control is not None:
                await control.unsubscribe()

    def _forget(self, call_id: str) -> None:
        del self._calls[call_id]
        if not self._calls:
            self._idle.set()

    async def _answer(self, call: _ServedCall, start: Callable[[], Any], streams: bool) -> Done | Failed:
        try:
            if streams:
                async with aclosing(start()) as replies:
                    await self._stream(call, replies)
            else:
                await self._reply(call, await start())
        except DynamoError as error:
            return Failed(call.sent, _one_line(str(error)))
        except Exception as error:  # noqa: BLE001
            # The boundary of an endpoint: an error ends this call alone.
            _log.error("%s failed", call.name, exc_info=error)
            return Failed(call.sent, _one_line(f"{type(error).__name__}: {error}"))
        return Done(call.sent)

    async def _stream(self, call: _ServedCall, replies: AsyncIterator[Any]) -> None:
        async for reply in replies:
            await self._reply(call, reply)

    async def _reply(self, call: _ServedCall, reply: Any) -> None:
        while call.replies - call.read >= WINDOW:
            call.credited.clear()
            await call.credited.wait()
        try:
            data = msgspec.msgpack.encode(reply)
        except (TypeError, OverflowError, RecursionError, UnicodeEncodeError) as error:
            raise RpcError(f"a reply cannot be sent: {error}") from error
        if len(data) > self._bus.max_payload - _OVERHEAD_BYTES:
            raise RpcError(f"a reply has {len(data)} bytes, too many for a message")
        frame = Reply(call.sent, data)
        call.sent += 1
        call.replies += 1
        await call.caller.send(frame)

    def _on_control(self, call: _ServedCall, control: Control) -> None:
        call.silent_beats = 0
        if isinstance(control, Credit):
            call.read = max(call.read, control.read)
            call.credited.set()
        else:
            call.hang_up()


def _decode(decoder: msgspec.msgpack.Decoder[Any], request: bytes) -> Any:
    try:
        return decoder.decode(request)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RpcError(f"the request has the wrong type: {error}") from error


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_ERROR_CHARS else line[: _MAX_ERROR_CHARS - 3] + "..."
