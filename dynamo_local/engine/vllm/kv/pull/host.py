"""The worker host's side of prefix pull: questions of other workers, put to the engine core and answered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from dynamo_local.core.errors import EngineError
from dynamo_local.core.messages.kv import PinAnswer, PinQuestion
from dynamo_local.core.messages.work import Submit
from dynamo_local.core.ports import Prefix, PulledPrefix
from dynamo_local.engine.vllm.kv.pull.messages import (
    LONGEST_LEASE_S,
    MOST_BLOCKS,
    Description,
    Handle,
    Pinned,
    Pull,
    PullCounts,
    TransferParams,
    Warm,
)
from dynamo_local.engine.vllm.patches.kv import core_method

_log = logging.getLogger(__name__)

BlockHashes = Callable[[Sequence[int], str | None, str | None], list[bytes]]
"""Hashes of a context's full blocks, by its tokens, its salt and its adapter."""

Fingerprints = Mapping[str | None, str]
"""Fingerprints of KV, which two engines must share to read each other's, by adapter (None: computed without one)."""

_ANSWER_TIMEOUT_S = 30.0
"""Time for an engine core to answer that is busy with a step: a long chunk of a prefill, on a CPU."""

_SWEEP_LATER_S = 0.01
"""Delay of the call that ends leases: it ends those that end soon after as well."""

_MOST_HANDLE_BYTES = 1 << 19

_handle_decoder = msgspec.msgpack.Decoder(Handle)
_handle_encoder = msgspec.msgpack.Encoder()


class PullHost:
    """Prefix pull of one engine core. `core` is vLLM's client of it. No method raises because the engine core has died:
    `step` does, and the worker ends."""

    def __init__(
        self,
        core: Any,
        description: Description,
        fingerprints: Fingerprints,
        hashes_of: BlockHashes,
        print_of: Callable[[Any], str | None] = lambda _: None,
    ) -> None:
        """`print_of`: the fingerprint of KV that is computed with an adapter."""
        self._core = core
        self._description = description
        self._fingerprints = dict(fingerprints)
        self._print_of = print_of
        self._known: dict[str, str] = {}
        """Names in the engine core of adapters that were loaded while it ran, by name."""
        self._hashes_of = hashes_of
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def unsupported(self) -> str | None:
        """Reason why blocks of this engine cannot be transferred, if they cannot."""
        return self._description.unsupported

    @property
    def block_bytes(self) -> int:
        """Bytes of KV in a block, on all of the engine's devices."""
        return self._description.block_bytes

    def know_adapter(self, name: str, adapter: Any) -> None:
        """Take note of an adapter that was loaded while the engine ran, or that has another content than before. No KV
        is transferred for it until its files have been read, which may take a while."""
        if self._known.get(name) == adapter.lora_name:
            return
        self._known[name] = adapter.lora_name
        self._fingerprints.pop(name, None)
        self._spawn(self._take_print(name, adapter), f"fingerprint of {name}")

    async def _take_print(self, name: str, adapter: Any) -> None:
        try:
            fingerprint = await asyncio.to_thread(self._print_of, adapter)
        except OSError as error:
            _log.warning("KV of adapter %s is not transferred: %s", name, error)
            return
        # Another content of it may have come meanwhile.
        if fingerprint is not None and self._known[name] == adapter.lora_name:
            self._fingerprints[name] = fingerprint

    def prefix(self, token_ids: Sequence[int], cache_salt: str | None, adapter: str | None) -> Prefix | None:
        """See core.ports.Engine."""
        fingerprint = self._fingerprints.get(adapter)
        if self._description.unsupported is not None or fingerprint is None:
            return None
        # Without the last token, which has to be computed to sample the next.
        hashes = self._hashes_of(token_ids[:-1], cache_salt, adapter)[:MOST_BLOCKS]
        rest = tuple(token_ids[len(hashes) * self._description.block_size : -1]) if len(hashes) < MOST_BLOCKS else ()
        return Prefix(fingerprint, tuple(hashes), rest)

    async def cached(self, prefix: Prefix) -> int:
        """See core.ports.Engine."""
        if not prefix.hashes:
            return 0
        found: int | None = await self._ask("cached", prefix.hashes)
        if found is None:
            raise EngineError("the engine core does not answer which blocks it has cached")
        return found

    async def pin(self, question: PinQuestion) -> PinAnswer:
        """See core.ports.Engine."""
        now = time.monotonic()
        until = now + min(question.keep_s, LONGEST_LEASE_S)
        refused = self._refusal(question)
        if refused is not None:
            return PinAnswer(blocks=0, refused=refused)
        arguments = (question.pin, question.hashes, until, question.rest)
        answer = await self._ask("pin", *arguments, timeout_s=until - now)
        if answer is None:
            return PinAnswer(blocks=0, refused="the engine is too busy")
        self.watch(until)
        pinned = msgspec.convert(answer, Pinned)
        handle = Handle(self._description.engine, self._description.agents, pinned.blocks)
        return PinAnswer(
            blocks=len(pinned.blocks) - (pinned.rest > 0),
            rest=pinned.rest,
            until=until,
            handle=msgspec.Raw(_handle_encoder.encode(handle)),
            refused=pinned.refused,
        )

    async def grow(self, warm: Warm, work: Submit, *, stays: bool) -> bool:
        """Whether `work` goes on from the cache of a warm request, under that one's name."""
        rest = work.token_ids[warm.tokens :]
        sampling = bytes(work.sampling)
        return bool(await self._ask("grow", warm.name, warm.tokens, rest, sampling, work.arrival_time, stays))

    async def confirm(self, pin: str) -> bool:
        """See core.ports.Engine."""
        return bool(await self._ask("confirm", pin))

    async def read_ended(self, pin: str) -> bool:
        """See core.ports.Engine."""
        return bool(await self._ask("read_ended", pin, timeout_s=LONGEST_LEASE_S))

    async def settle_read(self, pin: str, *, held: bool) -> None:
        """See core.ports.Engine."""
        await self._ask("settle_read", pin, held)

    def release(self, pins: Sequence[str] = (), holds: Sequence[str] = ()) -> None:
        """End leases, soon. Unknown ones are ignored."""
        self._spawn(self._release(pins, holds), "release leases")

    async def settle(self) -> None:
        """Wait until the engine core has dealt with everything that it was sent."""
        await self._release((), ())

    def watch(self, end: float) -> None:
        """Note the end of a lease: an idle engine core has to be told of it."""
        loop = asyncio.get_running_loop()
        when = loop.time() + max(end - time.monotonic(), 0.0) + _SWEEP_LATER_S
        if self._timer is None or when < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(when, self._sweep)

    async def counts(self) -> PullCounts:
        """Ask the engine core for its counts of blocks."""
        return msgspec.convert(await self._call("counts"), PullCounts)

    def params_of(self, work: Submit, pulled: PulledPrefix | None) -> dict[str, Any] | None:
        """A request's transfer parameters, if it has any."""
        pull = _pull_of(pulled, len(self._description.agents)) if pulled is not None else None
        params = TransferParams(pull=pull, hold_s=work.hold_s)
        return None if params == TransferParams() else msgspec.to_builtins(params, builtin_types=(bytes,))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()

    def _refusal(self, question: PinQuestion) -> str | None:
        if self._description.unsupported is not None:
            return self._description.unsupported
        if question.fingerprint not in self._fingerprints.values():
            return "the engines' KV caches have different fingerprints"
        if len(question.hashes) > MOST_BLOCKS:
            return f"the pin is of more than {MOST_BLOCKS} blocks"
        if not question.keep_s > 0:
            return "the pin is for no time"
        return None

    def _sweep(self) -> None:
        self._timer = None
        self.release()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, pins: Sequence[str], holds: Sequence[str]) -> None:
        next_end = await self._ask("release", pins, holds)
        if next_end is not None:
            self.watch(next_end)

    async def _ask(self, method: str, *args: Any, timeout_s: float = _ANSWER_TIMEOUT_S) -> Any:
        """The engine core's answer, or None if it has none to give."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._call(method, *args)
        except TimeoutError:
            _log.warning("the engine core did not answer within %.1f s", timeout_s)
        except Exception as error:  # noqa: BLE001
            # vLLM raises all sorts of errors for an engine core that dies. `step` reports its death.
            _log.warning("the engine core did not answer: %s", error)
        return None

    async def _call(self, method: str, *args: Any) -> Any:
        return await self._core.call_utility_async(core_method(method), *args)


async def open_pull(core: Any, vllm_config: Any, adapters: Any, identity: Mapping[str, str]) -> PullHost:
    """Open the host's side for an engine core that has started. `adapters` is a lora.Adapters, `identity` that of its
    model (identity.py)."""
    from dynamo_local.engine.vllm.kv.identity import BlockHasher, fingerprints

    description = msgspec.convert(await core.call_utility_async(core_method("describe")), Description)
    if description.unsupported is None:
        description = msgspec.structs.replace(description, unsupported=_why_closed(core))
    identities = (description.identity, identity, vllm_config.lora_config, adapters.requests)
    prints = await asyncio.to_thread(fingerprints, *identities)
    hasher = BlockHasher(vllm_config.cache_config)

    def print_of(adapter: Any) -> str | None:
        found = fingerprints(description.identity, identity, vllm_config.lora_config, [adapter])
        return found.get(adapter.lora_name)

    def hashes_of(token_ids: Sequence[int], cache_salt: str | None, adapter: str | None) -> list[bytes]:
        return hasher(token_ids, cache_salt, adapters.request(adapter))

    return PullHost(core, description, prints, hashes_of, print_of)


def _why_closed(core: Any) -> str | None:
    """Say why no other engine can read from the processes of this one; None if they can."""
    from vllm.platforms import current_platform

    from dynamo_local.engine.vllm.kv.agents import why_unreadable

    if not current_platform.is_cpu():
        return None
    reasons = (why_unreadable(process.pid) for process in core.resources.engine_manager.processes)
    return next((reason for reason in reasons if reason is not None), None)


def _pull_of(pulled: PulledPrefix, ranks: int) -> Pull | None:
    """Describe the read for the engine core. None: the source's handle makes no sense. `ranks`: of this engine, each of
    which takes the agent of its number, in a step."""
    data = bytes(pulled.answer.handle)
    try:
        if len(data) > _MOST_HANDLE_BYTES:
            raise msgspec.ValidationError(f"{len(data)} bytes are too many")
        handle = _handle_decoder.decode(data)
        if len(handle.agents) != ranks:
            raise msgspec.ValidationError(f"{len(handle.agents)} agents are not one for each of {ranks} ranks")
    except msgspec.DecodeError as error:
        _log.warning("the source's answer cannot be decoded: %s", error)
        return None
    blocks = min(pulled.answer.blocks, len(handle.blocks), len(pulled.hashes), MOST_BLOCKS)
    if blocks <= 0:
        return None
    whole = blocks == len(pulled.hashes) < len(handle.blocks)
    rest = max(min(pulled.answer.rest, pulled.rest), 0) if whole else 0
    handle = msgspec.structs.replace(handle, blocks=handle.blocks[: blocks + (rest > 0)])
    confirm = pulled.pin if pulled.to_confirm else ""
    return Pull(handle, pulled.hashes[:blocks], pulled.answer.until, rest, confirm)
