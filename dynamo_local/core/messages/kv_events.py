"""Messages about the blocks that workers have cached, for whoever routes to them.

Blocks are named by their keys (core/routing/caches/index.py), packed.
"""

from __future__ import annotations

from dynamo_local.core.codec import Message

MOST_KEYS = 50_000
"""Bound on the keys of a message, those removed and those stored together."""


class KvChanges(Message, frozen=True, omit_defaults=True):
    """What has become of a worker's cached blocks since its message before, or (`parts` > 0) a part of all of them.

    Changes: first `cleared`, then `removed`, then `stored`; a key is in one of the two at most. `number` is 1 for a
    worker's first changes, and grows by one. What has more than MOST_KEYS keys is sent as several messages.

    A repetition (`parts` > 0) tells the whole state as it is after the changes with this `number` (0: before any): the
    keys in `stored` of its parts 0 to `parts` - 1, which follow each other with no changes between them.
    """

    worker: str
    number: int
    removed: bytes = b""
    stored: bytes = b""
    cleared: bool = False
    part: int = 0
    parts: int = 0


class KvStateQuestion(Message, frozen=True, omit_defaults=True):
    """Asks a worker to publish a repetition. There is no other answer; one repetition may serve several questions."""
