"""The registry of keys under any sequence of orders: nobody gets in by a secret that is not theirs."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.documents import NewerDocumentError
from dynamo_local.core.errors import KeyAbsentError, KeyConflictError, StateError
from dynamo_local.core.keys.registry import (
    KEYS_VERSION,
    KeyRegistry,
    create_key,
    keys_from_document,
    keys_to_document,
    revoke_key,
    rotate_key,
)
from dynamo_local.core.keys.values import KeyTerms

NAMES = st.sampled_from(["a", "b", "c"])
ORDERS = st.lists(
    st.one_of(
        st.tuples(st.just("create"), NAMES, st.just(0.0)),
        st.tuples(st.just("rotate"), NAMES, st.sampled_from([0.0, 5.0, 50.0])),
        st.tuples(st.just("revoke"), NAMES, st.just(0.0)),
        st.tuples(st.just("wait"), st.just(""), st.floats(0, 60)),
    ),
    max_size=30,
)


class Model:
    """The naive model: which secret belongs to which key, and until when."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.valid: dict[str, dict[str, float]] = {}
        self.secrets = count()

    def secret(self) -> str:
        return f"secret {next(self.secrets)}"

    def known(self) -> dict[str, str]:
        return {
            secret: name
            for name, secrets in self.valid.items()
            for secret, until in secrets.items()
            if self.now < until
        }


@given(ORDERS)
def test_a_secret_is_known_from_its_order_until_its_end_and_for_its_key_alone(
    orders: list[tuple[str, str, float]],
) -> None:
    model, registry = Model(), KeyRegistry()
    numbers: list[int] = []
    for what, name, seconds in orders:
        if what == "wait":
            model.now += seconds
        elif what == "create" and name not in model.valid:
            secret = model.secret()
            registry = create_key(registry, KeyTerms(name=name), secret, model.now)
            model.valid[name] = {secret: float("inf")}
            numbers.append(registry.key(name).number)
        elif what == "create":
            with pytest.raises(KeyConflictError):
                create_key(registry, KeyTerms(name=name), "other", model.now)
        elif name not in model.valid:
            with pytest.raises(KeyAbsentError):
                revoke_key(registry, name)
        elif what == "rotate":
            secret, before = model.secret(), registry.key(name).digest
            registry = rotate_key(registry, name, secret, seconds, model.now)
            model.valid[name] = {before: model.now + seconds, secret: float("inf")}
        else:
            registry = revoke_key(registry, name, opens=True)
            del model.valid[name]
        known = {digest: key.name for key in registry.keys.values() for digest in key.digests(model.now)}
        assert known == model.known()
        assert keys_from_document(keys_to_document(registry)) == (registry, KEYS_VERSION)
    assert len(set(numbers)) == len(numbers)


def test_the_last_key_is_revoked_only_by_who_opens_the_server() -> None:
    registry = create_key(KeyRegistry(), KeyTerms(name="a"), "x", 0.0)
    with pytest.raises(KeyConflictError, match=r"answers everybody; .*--open"):
        revoke_key(registry, "a")
    assert revoke_key(registry, "a", opens=True).keys == {}


def test_a_later_key_gets_a_slot_that_is_free_and_a_number_of_its_own() -> None:
    registry = KeyRegistry()
    for name in "abc":
        registry = create_key(registry, KeyTerms(name=name), name, 0.0)
    registry = create_key(revoke_key(registry, "b"), KeyTerms(name="d"), "d", 0.0)
    assert [(key.name, key.slot, key.number) for key in registry.keys.values()] == [
        ("a", 0, 1),
        ("c", 2, 3),
        ("d", 1, 4),
    ]


def test_what_cannot_be_is_refused() -> None:
    document = keys_to_document(create_key(KeyRegistry(), KeyTerms(name="a"), "x", 0.0))
    with pytest.raises(NewerDocumentError, match="use the release that wrote it"):
        keys_from_document(document | {"schema_version": KEYS_VERSION + 1})
    entry = document["keys"]["a"]
    wrong: list[dict[str, object]] = [
        {"a": entry | {"name": "b"}},
        {"a": entry, "b": entry | {"name": "b"}},
        {"a": entry, "b": entry | {"name": "b", "number": 2, "digest": "y"}},
        {"a": entry | {"number": 0}},
        {"a": entry | {"slot": 1000}},
        {"a": entry | {"digest": 5}},
    ]
    for keys in wrong:
        with pytest.raises(StateError):
            keys_from_document(document | {"keys": keys})
