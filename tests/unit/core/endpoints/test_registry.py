"""The registry: whatever is ordered in whatever order, it stays consistent, and is read back as it was written."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dynamo_local.core.endpoints.checks import read_spec, runs_differently
from dynamo_local.core.endpoints.registry import (
    CONVERSIONS,
    SCHEMA_VERSION,
    NewerRegistryError,
    Registry,
    create,
    delete,
    from_document,
    ordered,
    renew,
    revert,
    settle,
    to_document,
    update,
)
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import ConfigError, EndpointAbsentError, EndpointConflictError, StateError
from tests.unit.core.endpoints.endpoints_strategies import NAMES, names, specs


def spec(name: str = "chat", **fields: Any) -> EndpointSpec:
    return read_spec({"name": name, "model": "m"} | fields)


def changed(registry: Registry, name: str = "chat", **fields: Any) -> Registry:
    return update(registry, msgspec.structs.replace(registry.entry(name).spec, **fields), 2.0)


CHAT = create(Registry(), spec(), 1.0)
UPDATING = changed(CHAT, model="other")


class Orders(RuleBasedStateMachine):
    """Any orders in any order. A refused one changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry()
        self.now = 0.0
        self.given: dict[tuple[int, int], EndpointSpec] = {}
        """By order number of the endpoint and number of the revision: what it was made for."""

    def do(self, change: Any, *args: Any, **named: Any) -> None:
        self.now += 1
        with suppress(ConfigError, EndpointAbsentError, EndpointConflictError):
            self.registry = change(self.registry, *args, **named)

    @rule(spec=specs() | names.flatmap(lambda base: specs(base=base)))
    def create(self, spec: EndpointSpec) -> None:
        known = spec.name in self.registry.entries
        before = self.registry
        self.do(create, spec, self.now)
        assert known is False or self.registry == before

    @rule(spec=specs())
    def update(self, spec: EndpointSpec) -> None:
        self.do(update, spec, self.now)

    @rule(name=names, number=st.integers(1, 4))
    def settle(self, name: str, number: int) -> None:
        self.do(settle, name, number)

    @rule(name=names, number=st.integers(1, 4))
    def revert(self, name: str, number: int) -> None:
        before = self.registry.entries.get(name)
        self.do(revert, name, number, self.now)
        if before is not None and before.earlier is not None and before.revision == number:
            after = self.registry.entry(name)
            assert (after.spec, after.revision, after.earlier) == (before.earlier.spec, before.earlier.revision, None)

    @rule(name=names)
    def delete(self, name: str) -> None:
        self.do(delete, name)

    @rule(listed=st.lists(specs(), max_size=3))
    def order_a_file(self, listed: list[EndpointSpec]) -> None:
        before = set(self.registry.entries)
        self.do(ordered, listed, self.now)
        assert before <= set(self.registry.entries)

    @invariant()
    def a_revision_runs_one_thing_for_ever(self) -> None:
        for entry in self.registry.entries.values():
            runs = [(entry.revision, entry.spec)]
            if entry.earlier is not None:
                runs.append((entry.earlier.revision, entry.earlier.spec))
            for number, run in runs:
                first = self.given.setdefault((entry.order, number), run)
                assert not runs_differently(first, run)

    @invariant()
    def every_spec_can_be_ordered_again(self) -> None:
        for entry in self.registry.entries.values():
            assert read_spec(msgspec.to_builtins(entry.spec)) == entry.spec

    @invariant()
    def adapters_have_a_base(self) -> None:
        for name in NAMES:
            assert name in self.registry.entries or not self.registry.adapters_of(name)

    @invariant()
    def it_is_read_back(self) -> None:
        data = msgspec.json.encode(to_document(self.registry))
        assert from_document(msgspec.json.decode(data)) == (self.registry, SCHEMA_VERSION)


TestOrders = Orders.TestCase
TestOrders.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


class TestTransitions:
    def test_a_name_is_given_once(self) -> None:
        with pytest.raises(EndpointConflictError, match="there is an endpoint chat already"):
            create(CHAT, spec(model="other"), 2.0)

    def test_bounds_stay_with_the_revision(self) -> None:
        entry = changed(CHAT, max_workers=4).entry("chat")
        assert (entry.revision, entry.earlier, entry.spec.max_workers) == (1, None, 4)
        assert (entry.created_at, entry.updated_at) == (1.0, 2.0)

    def test_another_model_is_another_revision(self) -> None:
        entry = UPDATING.entry("chat")
        assert entry.revisions == (2, 1)
        assert entry.earlier is not None
        assert entry.earlier.spec == spec()
        assert settle(UPDATING, "chat", 2).entry("chat").revisions == (2,)

    def test_a_failed_update_goes_back_and_its_number_is_not_given_again(self) -> None:
        back = revert(UPDATING, "chat", 2, 3.0)
        assert back.entry("chat").spec == spec()
        assert back.entry("chat").revisions == (1,)
        assert changed(back, model="third").entry("chat").revisions == (3, 1)

    def test_bounds_that_change_during_an_update_outlive_its_failure(self) -> None:
        registry = changed(UPDATING, min_workers=2, max_workers=3)
        assert registry.entry("chat").revisions == (2, 1)
        assert revert(registry, "chat", 2, 4.0).entry("chat").spec == spec(min_workers=2, max_workers=3)

    def test_an_update_of_an_update_replaces_it(self) -> None:
        assert changed(UPDATING, model="third").entry("chat").revisions == (3, 1)

    def test_an_order_of_what_answers_takes_an_update_back(self) -> None:
        entry = changed(UPDATING, model="m", max_workers=2).entry("chat")
        assert (entry.revisions, entry.spec) == ((1,), spec(max_workers=2))

    @pytest.mark.parametrize("number", [1, 3])
    def test_late_news_of_another_revision_change_nothing(self, number: int) -> None:
        assert settle(UPDATING, "chat", number) == UPDATING
        assert revert(UPDATING, "chat", number, 3.0) == UPDATING

    def test_an_update_that_changes_nothing_leaves_no_trace(self) -> None:
        assert update(CHAT, spec(), 9.0) is CHAT

    def test_unknown_names_are_answered_with_similar_ones(self) -> None:
        for change in (lambda: delete(CHAT, "chta"), lambda: CHAT.entry("chta"), lambda: update(CHAT, spec("chta"), 1)):
            with pytest.raises(EndpointAbsentError, match=r"there is no endpoint 'chta'; did you mean chat\?"):
                change()


class TestAdapters:
    BASED = create(CHAT, spec("fr", adapter_of="chat"), 2.0)

    def test_the_base_is_not_deleted_before_them(self) -> None:
        with pytest.raises(EndpointConflictError, match="endpoint chat is the base of adapters: fr; delete those"):
            delete(self.BASED, "chat")
        assert not delete(delete(self.BASED, "fr"), "chat").entries

    def test_the_base_must_exist_and_be_none_itself(self) -> None:
        with pytest.raises(ConfigError, match=r"its base chta does not exist; did you mean chat\?"):
            create(CHAT, spec("fr", adapter_of="chta"), 2.0)
        with pytest.raises(ConfigError, match=r"its base fr is an adapter itself; write adapter_of: chat"):
            create(self.BASED, spec("de", adapter_of="fr"), 2.0)

    def test_an_endpoint_does_not_become_one(self) -> None:
        with pytest.raises(ConfigError, match="adapter_of cannot be changed"):
            update(create(CHAT, spec("b"), 2.0), spec("b", adapter_of="chat"), 3.0)

    def test_a_file_may_list_them_before_their_base(self) -> None:
        registry = ordered(Registry(), [spec("fr", adapter_of="chat"), spec("b"), spec()], 1.0)
        assert list(registry.entries) == ["b", "chat", "fr"]


def test_a_file_creates_updates_and_leaves_the_rest() -> None:
    registry = ordered(CHAT, [spec("b"), spec(model="other")], 2.0)
    assert registry.entry("chat").revisions == (2, 1)
    assert registry.entry("b").revisions == (1,)
    assert ordered(registry, [], 3.0) == registry
    with pytest.raises(ConfigError, match="endpoint b is given twice"):
        ordered(CHAT, [spec("b"), spec("b")], 2.0)


class TestDocuments:
    def test_the_version_is_first(self) -> None:
        assert next(iter(to_document(CHAT))) == "schema_version"

    def test_a_later_version_is_refused(self) -> None:
        with pytest.raises(NewerRegistryError, match=r"has version 9, and this release reads 3 at most; .*--forget"):
            from_document(to_document(CHAT) | {"schema_version": 9, "news": 1})

    def test_an_earlier_version_is_converted_step_by_step(self) -> None:
        def from_0(document: dict[str, Any]) -> dict[str, Any]:
            """Version 0, which never was, had a list of models."""
            registry = ordered(Registry(), [spec(name) for name in document["models"]], 0.0)
            return {name: value for name, value in to_document(registry).items() if name != "schema_version"}

        registry, version = from_document({"schema_version": 0, "models": ["a", "b"]}, {**CONVERSIONS, 0: from_0})
        assert (list(registry.entries), version) == (["a", "b"], 0)

    def test_version_1_knows_nothing_of_idle_times(self) -> None:
        registry, version = from_document(to_document(CHAT) | {"schema_version": 1})
        assert (registry, version) == (CHAT, 1)

    @pytest.mark.parametrize(
        "document",
        [
            None,
            [],
            {},
            {"schema_version": "1"},
            {"schema_version": True},
            {"schema_version": -1},
            {"schema_version": 0},
            {"schema_version": 1, "entries": 3},
            to_document(CHAT) | {"more": 1},
            to_document(CHAT) | {"next_order": 1},
        ],
    )
    def test_anything_else_is_no_registry(self, document: Any) -> None:
        with pytest.raises(StateError):
            from_document(document)

    @pytest.mark.parametrize(
        "fields",
        [
            {"revision": 0},
            {"last_revision": 0},
            {"revision": 2},
            {"order": 0},
            {"spec": {"name": "other", "model": "m"}},
            {"spec": {"name": "chat", "model": "m", "adapter_of": "b"}},
            {"spec": {"name": "chat", "model": "m", "adapter_of": "chat"}},
            {"earlier": {"spec": {"name": "chat", "model": "m"}, "revision": 1}},
            {"revision": 1, "last_revision": 3, "earlier": {"spec": {"name": "chat", "model": "m"}, "revision": 2}},
        ],
    )
    def test_a_registry_that_no_orders_make_is_none(self, fields: dict[str, Any]) -> None:
        document = to_document(CHAT)
        entry = document["entries"]["chat"] | fields
        with pytest.raises(StateError):
            from_document(document | {"entries": {"chat": entry}})


@given(specs())
def test_a_spec_survives_the_registry(given_spec: EndpointSpec) -> None:
    data = msgspec.json.encode(to_document(create(Registry(), given_spec, 0.5)))
    assert from_document(msgspec.json.decode(data))[0].entry(given_spec.name).spec == given_spec


def test_a_name_that_nobody_has_is_shown_shortened() -> None:
    with pytest.raises(EndpointAbsentError) as refused:
        CHAT.entry("x" * 100_000)
    assert len(str(refused.value)) < 200


def test_another_revision_for_a_changed_model_has_the_same_spec_and_can_be_taken_back() -> None:
    renewed = renew(CHAT, "chat", 1, 5.0)
    entry = renewed.entry("chat")
    assert (entry.spec, entry.revision, entry.revisions) == (spec(), 2, (2, 1))
    assert renew(renewed, "chat", 1, 6.0) == renewed, "it was renewed meanwhile"
    assert revert(renewed, "chat", 2, 6.0).entry("chat").revision == 1
    again = renew(renewed, "chat", 2, 7.0).entry("chat")
    assert (again.revision, again.revisions) == (3, (3, 1))
    assert from_document(to_document(renewed))[0] == renewed
