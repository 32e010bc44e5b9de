"""The caller's side of endpoint calls. The server's side is in server.py, the protocol in messages.py."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.rpc.messages import (
    BEAT_S,
    SILENT_BEATS,
    WINDOW,
    Alive,
    Begin,
    Control,
    Credit,
    Done,
    Failed,
    Frame,
    Hangup,
    Refused,
    Reply,
    Taken,
)
from dynamo_local.bus.subscriptions import Message, Subscription
from dynamo_local.core import codec
from dynamo_local.core.beats import until_beat
from dynamo_local.core.errors import BusError, DecodeError, RpcError
from dynamo_local.core.subjects import Subjects
from dynamo_local.core.suggestions import suggest
from dynamo_local.sdk.client import Call, EndpointClient
from dynamo_local.sdk.service import EndpointSpec, spec_of
from dynamo_local.sdk.signatures import reply_type

_log = logging.getLogger(__name__)

FIND_ATTEMPTS = 20
FIND_PAUSE_S = 0.1
"""Attempts to find an instance of a service, and the pause between them: time enough to replace its process."""

_OVERHEAD_BYTES = 1024
"""Room for the other fields and the headers of a message beside its payload."""


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
        call_id = uuid.uuid4().hex
        call = self._open[call_id] = _OpenCall(f"{service}.{endpoint}")
        begin = codec.encode(Begin(call_id, request))
        if len(begin) > self._bus.max_payload - _OVERHEAD_BYTES:
            del self._open[call_id]
            raise RpcError(f"the request to {call.name} has {len(begin)} bytes, too many for a message")
        try:
            await self._begin(call, call_id, self._subjects.call(service, endpoint), begin)
            while (data := await call.reply()) is not None:
                if call.read % (WINDOW // 2) == 0:
                    await self._control(call_id, Credit(call.read))
                yield data
        finally:
            del self._open[call_id]
            if not call.ended:
                await self._control(call_id, Hangup())

    async def _begin(self, call: _OpenCall, call_id: str, subject: str, begin: bytes) -> None:
        for _ in range(FIND_ATTEMPTS):
            try:
                await self._bus.publish(subject, begin, reply=f"{self._inbox}.{call_id}")
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

    async def _on_frame(self, message: Message) -> None:
        call_id = message.subject.rpartition(".")[2]
        call = self._open.get(call_id)
        if call is None:
            # The call was closed here, and the server has not heard of it.
            if message.data:
                await self._control(call_id, Hangup())
            return
        if not message.data:
            # NATS itself answers with an empty message when nobody subscribes.
            call.take(Refused("no instance of the service is ready"))
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
        self._frames: deque[Taken | Refused | Reply | Done | Failed] = deque()
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
        if isinstance(frame, Reply | Done | Failed | Alive):
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
        if isinstance(frame, Refused):
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
        if isinstance(frame, Failed):
            raise RpcError(f"{self.name} failed: {frame.error}")
        if isinstance(frame, Done):
            return None
        raise RpcError(f"{self.name} sent an answer that cannot be understood")

    async def _next(self) -> Taken | Refused | Reply | Done | Failed:
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
