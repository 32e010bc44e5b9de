"""Events of single epochs, for code that waits until a request has been computed or forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from dynamo_local.core.messages.work import RequestEpoch


@dataclass
class EpochListener:
    """Events of one epoch, set when they have happened."""

    computed: asyncio.Event = field(default_factory=asyncio.Event)
    """The engine has finished the epoch, or it was cancelled."""
    forgotten: asyncio.Event = field(default_factory=asyncio.Event)
    """The worker has nothing left of the epoch: the frontend has acknowledged its end, or is gone."""


class EpochEvents:
    """The listeners of one worker. Events of epochs that have none are ignored."""

    def __init__(self) -> None:
        self._listeners: dict[RequestEpoch, EpochListener] = {}

    def add(self, request: RequestEpoch) -> EpochListener:
        """Listen to an epoch until it is forgotten."""
        listener = self._listeners[request] = EpochListener()
        return listener

    def computed(self, request: RequestEpoch) -> None:
        """Report that the epoch has finished."""
        if (listener := self._listeners.get(request)) is not None:
            listener.computed.set()

    def forgotten(self, requests: Iterable[RequestEpoch]) -> None:
        """Report that nothing is left of these epochs."""
        for request in requests:
            if (listener := self._listeners.pop(request, None)) is not None:
                listener.computed.set()
                listener.forgotten.set()
