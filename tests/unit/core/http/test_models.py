"""Which model a request goes to: the one that it names, or an answer that says which there are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.http.bounds.admission import Refusal, read_fields
from dynamo_local.core.http.paths import NAME_CHARACTERS, Catalogue, asked_model

names = st.text("abc-/@", min_size=1, max_size=4)
models = st.lists(st.lists(names, min_size=1, max_size=3, unique=True), max_size=6)


def catalogue(listed: list[list[str]]) -> Catalogue[int]:
    return Catalogue((each, number) for number, each in enumerate(listed))


@given(models, names)
def test_a_request_goes_to_the_first_model_of_the_name_it_gives_and_to_no_other(
    listed: list[list[str]], name: str
) -> None:
    owners = [number for number, each in enumerate(listed) if name in each]
    found = catalogue(listed).find(name)
    if owners:
        assert found == owners[0]
    else:
        assert isinstance(found, Refusal)
        assert (found.status, found.param, name in found.message) == (404, "model", True)


def test_a_single_model_whose_names_are_not_known_yet_gets_every_request() -> None:
    assert catalogue([[]]).find("a") == 0


@given(models)
def test_without_a_name_there_is_one_model_or_a_list_of_them(listed: list[list[str]]) -> None:
    found = catalogue(listed).find(None)
    if len(listed) == 1:
        assert found == 0
        return
    assert isinstance(found, Refusal)
    assert found.status == 400
    assert all(each[0] in found.message for each in listed)


def test_errors_do_not_grow_with_what_clients_ask_or_how_many_models_there_are() -> None:
    many = catalogue([[f"model-{number}"] for number in range(1000)])
    for name in (None, "x" * NAME_CHARACTERS):
        refused = many.find(name)
        assert isinstance(refused, Refusal)
        assert len(refused.message) < 1000


any_value = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.lists(st.text()) | st.text()


@given(any_value)
def test_a_name_is_a_string_within_bounds_or_refused(value: Any) -> None:
    found = asked_model({"model": value})
    if isinstance(value, str) and value:
        assert found == value
    elif value is None or value == "":
        assert found is None
    else:
        assert isinstance(found, Refusal)
        assert found.status == 400


def test_a_name_may_be_as_long_as_a_path_and_no_longer() -> None:
    assert asked_model({"model": "x" * NAME_CHARACTERS}) == "x" * NAME_CHARACTERS
    assert isinstance(asked_model({"model": "x" * (NAME_CHARACTERS + 1)}), Refusal)
    assert asked_model({}) is None


@pytest.mark.parametrize("body", ['{"model": "a", "model": "b"}', '{"model": "b", "x": {"model": "a"}}'])
def test_of_two_names_the_server_behind_reads_the_same_one(body: str) -> None:
    fields = read_fields(body.encode())
    assert not isinstance(fields, Refusal)
    assert asked_model(fields) == json.loads(body)["model"] == "b"
