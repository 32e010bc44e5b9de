"""What a worker publishes of its cached blocks, and what a reader of it knows: one who joins at any time, loses
anything, and asks when a number is missing, knows what the worker has."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dynamo_local.core import codec
from dynamo_local.core.messages.kv import KvChanges
from dynamo_local.core.ports import CacheChanges
from dynamo_local.core.routing.caches.index import pack, unpack
from dynamo_local.core.routing.caches.mirror import CacheMirror
from tests.kv_reader import KvReader

MOST = 3
KEYS = st.sets(st.integers(0, 9).map(lambda key: key + 2**63), max_size=6)


class Publishing(RuleBasedStateMachine):
    """A worker, and a reader behind a bus that loses messages but keeps their order."""

    def __init__(self) -> None:
        super().__init__()
        self.mirror = CacheMirror("w", most_keys=MOST)
        self.reader = KvReader()
        self.cached: set[int] = set()

    def send(self, messages: list[KvChanges], arrive: st.DataObject | None = None) -> None:
        for message in messages:
            assert len(message.stored) + len(message.removed) <= 8 * MOST
            assert not set(unpack(message.stored)) & set(unpack(message.removed))
            if arrive is None or arrive.draw(st.booleans()):
                self.reader.read(codec.decode(codec.encode(message), KvChanges))

    @rule(stored=KEYS, removed=KEYS, cleared=st.sampled_from([False, False, False, True]))
    def step(self, stored: set[int], removed: set[int], cleared: bool) -> None:
        removed -= stored
        self.mirror.apply(CacheChanges(pack(removed), pack(stored), cleared))
        self.cached = ((set() if cleared else self.cached) - removed) | stored

    @invariant()
    def it_knows_how_many_there_are(self) -> None:
        assert len(self.mirror) == len(self.cached)

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.send(self.mirror.take(), data)

    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        self.send(self.mirror.take(), data)
        self.send(self.mirror.repetition(), data)

    @rule(data=st.data())
    def end_a_burst(self, data: st.DataObject) -> None:
        self.send(self.mirror.take(), data)
        self.send([self.mirror.nothing_new()], data)

    @rule()
    def join_anew(self) -> None:
        self.reader = KvReader()

    @rule()
    def notice_and_ask(self) -> None:
        """Once a message arrives, a gap is seen; a reader that asks then is in step."""
        self.send(self.mirror.take())
        self.send([self.mirror.nothing_new()])
        if self.reader.number is None:
            self.send(self.mirror.repetition())
        assert self.reader.number is not None
        assert self.reader.keys == self.cached

    @invariant()
    def the_mirror_is_exact(self) -> None:
        assert self.mirror.keys() == self.cached
        assert all((key in self.mirror) == (key in self.cached) for key in range(2**63, 2**63 + 10))


TestPublishing = Publishing.TestCase
TestPublishing.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def changes(stored: list[int] = [], removed: list[int] = [], *, cleared: bool = False) -> CacheChanges:  # noqa: B006
    return CacheChanges(pack(removed), pack(stored), cleared)


def test_what_comes_and_goes_between_two_messages_is_not_told() -> None:
    mirror = CacheMirror("w")
    mirror.apply(changes([1, 2]))
    mirror.apply(changes(removed=[1]))
    assert mirror.take() == [KvChanges("w", 1, stored=pack([2]))]
    mirror.apply(changes(removed=[2]))
    mirror.apply(changes([2]))
    assert not mirror.has_news
    assert mirror.take() == []


def test_a_reset_is_one_message_and_none_where_nothing_was_published() -> None:
    mirror = CacheMirror("w")
    mirror.apply(changes([1]))
    mirror.apply(changes(cleared=True))
    assert mirror.take() == []
    mirror.apply(changes([1, 2]))
    assert [message.number for message in mirror.take()] == [1]
    mirror.apply(changes([3], cleared=True))
    assert mirror.take() == [KvChanges("w", 2, stored=pack([3]), cleared=True)]
    mirror.apply(changes(cleared=True))
    assert mirror.take() == [KvChanges("w", 3, cleared=True)]


@given(st.integers(0, 20))
def test_a_repetition_has_a_part_even_if_nothing_is_cached(count: int) -> None:
    mirror = CacheMirror("w", most_keys=MOST)
    mirror.apply(changes(list(range(count))))
    number = len(mirror.take())
    parts = mirror.repetition()
    assert {(each.number, each.parts) for each in parts} == {(number, len(parts))}
    assert [each.part for each in parts] == list(range(len(parts)))
    assert sorted(key for each in parts for key in unpack(each.stored)) == list(range(count))
