"""Calls of `@endpoint`s over the bus: their messages, the server that answers them, and the client."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dynamo_local.bus.nats import Bus, RawMessage, Subscription
from dynamo_local.core import codec
from dynamo_local.core.beats import until_beat
from dynamo_local.core.codec import Message
from dynamo_local.core.errors import BusError, DecodeError, DynamoError, RpcError
from dynamo_local.core.subjects import Subjects
from dynamo_local.core.suggestions import suggest
from dynamo_local.sdk.client import Call, EndpointClient
from dynamo_local.sdk.service import EndpointSpec, reply_type, request_type, spec_of
from dynamo_local.tasks import TaskGuard

_log = logging.getLogger(__name__)


# Messages of endpoint calls, between caller and server.
#
#     caller -> Subjects.call(service, endpoint)     Begin                     one instance gets it
#     server -> the caller's inbox.{call id}         Taken | NotTaken          then, after Taken:
#                                                    Reply* End                with Alive in between
#     caller -> Subjects.call_control(call id)       Credit | Hangup
#
# Frames of a call are numbered: `seq` counts from 0, over Reply and End. Alive carries the number of the next
# frame, so that a loss shows even when no frame follows. Both sides send something every beat; a side that hears
# nothing for `SILENT_BEATS` of its own beats takes the other for dead. A server sends at most `WINDOW` replies beyond
# the last credit, which bounds what a slow reader makes its process keep.

BEAT_S = 1.0
SILENT_BEATS = 5
"""Beats, not seconds: a process that was held up has counted few beats, and does not blame the other side."""

WINDOW = 128
"""Replies of a call that are on their way or not read yet, at most."""

MAX_CALLS = 1024
"""Calls that one process serves at once, at most."""


class Begin(Message, frozen=True):
    """Starts a call. `request` is msgpack, empty if there is none. `caller`: subject on which the frames are heard."""

    call_id: str
    caller: str
    request: bytes


class Taken(Message, frozen=True, tag="taken"):
    """An instance serves the call and listens to its control subject."""


class NotTaken(Message, frozen=True, tag="not_taken"):
    """The call was not begun; it may be tried again."""

    reason: str


class Reply(Message, frozen=True, tag="reply"):
    """A reply, in msgpack."""

    seq: int
    data: bytes


class End(Message, frozen=True, tag="end"):
    """The call has ended: no more replies follow. `error`: what the endpoint raised, in one line; None: nothing."""

    seq: int
    error: str | None = None


class Alive(Message, frozen=True, tag="alive"):
    """The call goes on; frame `seq` is the next."""

    seq: int


class Credit(Message, frozen=True, tag="credit"):
    """The caller is alive, and has read `read` replies."""

    read: int


class Hangup(Message, frozen=True, tag="hangup"):
    """The caller wants no more replies."""


Frame = Taken | NotTaken | Reply | End | Alive
Control = Credit | Hangup


# The server's side.

_QUEUE = "instances"
"""Queue group: each call is delivered to one instance of a service."""
_OVERHEAD_BYTES = 1024
"""Room for the other fields and the headers of a message beside its payload."""
_MAX_ERROR_CHARS = 1000
_CANCEL_DEADLINE_S = 2.0


@dataclass
class _ServedCall:
    """A call being served. `sent` counts its frames, `replies` the replies among them, `read` the replies read."""

    name: str
    caller: str
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
            self._subscriptions.append(await self._bus.listen(subject, Begin, handler, queue=_QUEUE))
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
                    await self._send(call.caller, Alive(call.sent))

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

    def _handler(self, instance: object, endpoint: EndpointSpec) -> Callable[[Begin], Awaitable[None]]:
        cls = type(instance)
        name = f"{spec_of(cls).name}.{endpoint.name}"
        method = getattr(instance, endpoint.method)
        decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(request_type(cls, endpoint))

        async def on_begin(begin: Begin) -> None:
            if self._stopping or len(self._calls) >= self._max_calls:
                why = "it is stopping" if self._stopping else "it is at its limit of calls"
                await self._send(begin.caller, NotTaken(why))
                return
            call = _ServedCall(name, begin.caller)
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
            await self._send(call.caller, Taken())
            last = await self._answer(call, start, streams)
            await self._send(call.caller, last)
        except asyncio.CancelledError:
            if call.hung_up:
                return
            await self._send(call.caller, End(call.sent, "its process is stopping"))
            raise
        except BusError as error:
            _log.warning("a call of %s cannot be served: %s", call.name, error)
        finally:
            if control is not None:
                await control.unsubscribe()

    async def _send(self, caller: str, frame: Frame) -> None:
        try:
            await self._bus.send(caller, frame)
        except BusError as error:
            # The caller notices the silence, or that a frame is missing.
            _log.warning("a frame of a call could not be sent: %s", error)

    def _forget(self, call_id: str) -> None:
        del self._calls[call_id]
        if not self._calls:
            self._idle.set()

    async def _answer(self, call: _ServedCall, start: Callable[[], Any], streams: bool) -> End:
        try:
            if streams:
                async with aclosing(start()) as replies:
                    await self._stream(call, replies)
            else:
                await self._reply(call, await start())
        except DynamoError as error:
            return End(call.sent, _one_line(str(error)))
        except Exception as error:  # noqa: BLE001
            # The boundary of an endpoint: an error ends this call alone.
            _log.error("%s failed", call.name, exc_info=error)
            return End(call.sent, _one_line(f"{type(error).__name__}: {error}"))
        return End(call.sent)

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
        await self._send(call.caller, frame)

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


# The caller's side.

FIND_ATTEMPTS = 20
FIND_PAUSE_S = 0.1
"""Attempts to find an instance of a service, and the pause between them: time enough to replace its process."""


class CallClient:
    """The calls that one process makes. Call `start()`, and keep `run()` running while calls are made."""

    def __init__(self, bus: Bus, subjects: Subjects, *, beat_s: float = BEAT_S) -> None:
        self._bus = bus
        self._subjects = subjects
        self._beat_s = beat_s
        self._inbox = bus.inbox()
        self._open: dict[str, _OpenCall] = {}
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Listen for replies."""
        self._subscription = await self._bus.subscribe(f"{self._inbox}.*", self._on_frame)

    async def run(self) -> None:
        """Send a beat for each call, and fail calls whose server is silent, until cancelled."""
        while True:
            await asyncio.sleep(until_beat(time.monotonic(), self._beat_s))
            for call_id, call in list(self._open.items()):
                call.beat()
                if call.taken:
                    await self._control(call_id, Credit(call.read))

    async def stop(self) -> None:
        """Fail the open calls, and stop listening."""
        for call in self._open.values():
            call.fail(RpcError(f"{call.name} was cancelled: this process ends"))
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    def service(self, cls: type) -> RemoteService:
        """A client of a service in the same namespace."""
        return RemoteService(self, cls)

    async def call(self, service: str, endpoint: str, request: bytes) -> AsyncGenerator[bytes, None]:
        """Call an endpoint. `request` and the replies are msgpack. Raises RpcError."""
        name, call_id = f"{service}.{endpoint}", uuid.uuid4().hex
        if len(request) > self._bus.max_payload - _OVERHEAD_BYTES:
            raise RpcError(f"the request to {name} has {len(request)} bytes, too many for a message")
        call = self._open[call_id] = _OpenCall(name)
        try:
            begin = Begin(call_id, f"{self._inbox}.{call_id}", request)
            await self._begin(call, self._subjects.call(service, endpoint), begin)
            while (data := await call.reply()) is not None:
                if call.read % (WINDOW // 2) == 0:
                    await self._control(call_id, Credit(call.read))
                yield data
        finally:
            del self._open[call_id]
            if not call.ended:
                await self._control(call_id, Hangup())

    async def _begin(self, call: _OpenCall, subject: str, begin: Begin) -> None:
        for _ in range(FIND_ATTEMPTS):
            try:
                # NATS tells the reply subject if nobody listens.
                await self._bus.send(subject, begin, reply=begin.caller)
            except BusError as error:
                call.ended = True
                raise RpcError(f"{call.name} cannot be called: {error}") from error
            refusal = await call.answer()
            if refusal is None:
                return
            await asyncio.sleep(FIND_PAUSE_S)
        call.ended = True
        raise RpcError(f"{call.name} cannot be called: {refusal}", "see `dynamo ps` and `dynamo logs`")

    async def _control(self, call_id: str, message: Control) -> None:
        try:
            await self._bus.send(self._subjects.call_control(call_id), message)
        except BusError as error:
            # The server notices the silence, and ends the call by itself.
            _log.warning("a control message of call %s could not be sent: %s", call_id, error)

    async def _on_frame(self, message: RawMessage) -> None:
        # Not by `listen`: what cannot be decoded ends its call, as does NATS's notice that nobody listens.
        call_id = message.subject.rpartition(".")[2]
        call = self._open.get(call_id)
        if call is None:
            # The call was closed here, and the server has not heard of it.
            if message.data:
                await self._control(call_id, Hangup())
            return
        if not message.data:
            # NATS itself answers with an empty message when nobody subscribes.
            call.take(NotTaken("no instance of the service is ready"))
            return
        try:
            call.take(codec.decode(message.data, Frame))
        except DecodeError as error:
            call.fail(RpcError(f"{call.name} sent an answer that cannot be understood: {error}"))


class _OpenCall:
    """The state of one call, and its frames that have not been read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.read = 0
        self.taken = False
        self.ended = False
        """Whether the server has ended its part of the call."""
        self._frames: deque[Taken | NotTaken | Reply | End] = deque()
        self._failure: RpcError | None = None
        self._changed = asyncio.Event()
        self._next_seq = 0
        self._silent_beats = 0

    def take(self, frame: Frame) -> None:
        """Accept a frame that has arrived."""
        if self._failure is not None:
            # Frames behind a lost one must not be read as if nothing were missing.
            return
        self._silent_beats = 0
        if isinstance(frame, Reply | End | Alive):
            if frame.seq != self._next_seq:
                self.fail(RpcError(f"replies of {self.name} were lost on the way"))
                return
            if isinstance(frame, Alive):
                return
            self._next_seq += 1
        if len(self._frames) > 2 * WINDOW:
            self.fail(RpcError(f"{self.name} sends more replies than it may"))
            return
        self._frames.append(frame)
        self._changed.set()

    def beat(self) -> None:
        """Count a beat; too many without a frame in between mean that the server is dead."""
        self._silent_beats += 1
        if self._silent_beats > SILENT_BEATS:
            self.fail(RpcError(f"{self.name} fell silent", "its process was probably killed; see `dynamo logs`"))

    def fail(self, error: RpcError) -> None:
        """End the call with an error, which is raised after the frames that came before."""
        if not self.ended and self._failure is None:
            self._failure = error
            self._changed.set()

    async def answer(self) -> str | None:
        """Wait until the call is taken (None) or refused (why)."""
        frame = await self._next()
        if isinstance(frame, NotTaken):
            return frame.reason
        if not isinstance(frame, Taken):
            raise RpcError(f"{self.name} sent an answer that cannot be understood")
        self.taken = True
        return None

    async def reply(self) -> bytes | None:
        """Wait for the next reply; None after the last."""
        frame = await self._next()
        if isinstance(frame, Reply):
            self.read += 1
            return frame.data
        self.ended = True
        if not isinstance(frame, End):
            raise RpcError(f"{self.name} sent an answer that cannot be understood")
        if frame.error is not None:
            raise RpcError(f"{self.name} failed: {frame.error}")
        return None

    async def _next(self) -> Taken | NotTaken | Reply | End:
        while not self._frames:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        return self._frames.popleft()


class RemoteService:
    """A `ServiceClient` over the bus: the methods that are endpoints of the service class are its attributes.

    Raises GraphError if their annotations cannot be evaluated.
    """

    def __init__(self, client: CallClient, cls: type) -> None:
        spec = spec_of(cls)
        self._name = spec.name
        self._endpoints: dict[str, EndpointClient] = {
            endpoint.method: _RemoteEndpoint(client, cls, endpoint) for endpoint in spec.endpoints.values()
        }

    def __getattr__(self, name: str) -> EndpointClient:
        if name.startswith("_") or name not in self._endpoints:
            hint = suggest(name, self._endpoints, "it has") if not name.startswith("_") else "it is private"
            raise AttributeError(f"{self._name} has no endpoint {name}; {hint}")
        return self._endpoints[name]


class _RemoteEndpoint:
    def __init__(self, client: CallClient, cls: type, endpoint: EndpointSpec) -> None:
        self._client = client
        self._endpoint = endpoint
        self._service = spec_of(cls).name
        self._name = f"{self._service}.{endpoint.name}"
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(reply_type(cls, endpoint))

    def __call__(self, request: Any = None) -> Call:
        return Call(self._name, self._replies(request))

    async def _replies(self, request: Any) -> AsyncGenerator[Any, None]:
        replies = self._client.call(self._service, self._endpoint.name, self._encode(request))
        try:
            async for data in replies:
                yield self._decode(data)
        finally:
            await replies.aclose()

    def _encode(self, request: Any) -> bytes:
        if not self._endpoint.takes_request:
            if request is not None:
                raise RpcError(f"{self._name} takes no request")
            return b""
        try:
            return msgspec.msgpack.encode(request)
        except (TypeError, OverflowError, RecursionError, UnicodeEncodeError) as error:
            raise RpcError(f"the request to {self._name} cannot be sent: {error}") from error

    def _decode(self, data: bytes) -> Any:
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RpcError(f"{self._name} sent a reply of the wrong type: {error}") from error
