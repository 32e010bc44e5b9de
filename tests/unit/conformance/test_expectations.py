"""The list of what vLLM's tests are expected to do, and the comparison with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conformance.__main__ import LIST
from tests.conformance.expectations import UNEXPLAINED, Expectation, counts, judge, parse, passing, render, update

TEXT = """\
[passes]
a::one
a::two

[fails: the model babbles]
a::three

[fails here: the path is not open]
b::four

[passes here: vLLM needs a setting]
b::five

[varies: no seed]
b::six
"""
EXPECTED = parse(TEXT)
AS_LISTED = {"a::one": True, "a::two": True, "a::three": False, "b::four": False, "b::five": True, "b::six": False}

names = st.from_regex(r"[a-z/_]+\.py::[a-zA-Z_\[\]-]+", fullmatch=True)
reasons = st.from_regex(r"[a-zA-Z][a-zA-Z :,\]-]{0,20}[a-z]", fullmatch=True)
expectations_ = st.one_of(
    st.just(Expectation(here=True, vllm=True)),
    st.builds(
        lambda pair, reason: Expectation(pair[0], pair[1], reason),
        st.sampled_from([(False, False), (False, True), (True, False), (None, None)]),
        reasons,
    ),
)


@given(st.dictionaries(names, expectations_))
def test_what_is_rendered_is_parsed_to_the_same(expected: dict[str, Expectation]) -> None:
    assert parse(render(expected)) == expected


def test_a_text_is_rendered_as_it_was() -> None:
    assert render(EXPECTED) == TEXT


@pytest.mark.parametrize(
    "text",
    ["a::one", "[passes]\na::one\na::one", "[passes: why]\na", "[fails]\na", "[fails there: why]\na", "[passes\na"],
)
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="line"):
        parse(text)


def test_a_run_as_listed_has_no_complaint() -> None:
    assert judge(EXPECTED, AS_LISTED, "here").as_expected
    assert judge(EXPECTED, AS_LISTED | {"b::four": True, "b::five": False}, "vllm").as_expected


@pytest.mark.parametrize("varying", [True, False])
def test_what_varies_may_do_either(varying: bool) -> None:
    assert judge(EXPECTED, AS_LISTED | {"b::six": varying}, "here").as_expected


def test_what_passed_and_fails_is_told_and_so_is_what_failed_and_passes() -> None:
    verdict = judge(EXPECTED, AS_LISTED | {"a::one": False, "a::three": True, "b::four": True}, "here")
    assert verdict.newly_failing == ("a::one",)
    assert verdict.newly_passing == ("a::three", "b::four")
    assert not verdict.as_expected


def test_what_is_not_listed_and_what_did_not_run_is_told() -> None:
    ran = {test: passed for test, passed in AS_LISTED.items() if test != "a::two"} | {"c::new": True}
    verdict = judge(EXPECTED, ran, "here")
    assert (verdict.unlisted, verdict.not_run) == (("c::new",), ("a::two",))
    assert not verdict.as_expected
    assert judge(EXPECTED, ran, "here", whole=False).not_run == ()


def test_an_update_keeps_what_is_as_listed_and_its_reasons() -> None:
    assert update(EXPECTED, AS_LISTED, "here") == EXPECTED


def test_an_update_leaves_the_reason_of_what_has_changed_to_a_person() -> None:
    new = update(EXPECTED, AS_LISTED | {"a::one": False, "b::four": True, "c::new": False}, "here")
    assert new["a::one"] == Expectation(here=False, vllm=True, reason=UNEXPLAINED)
    assert new["b::four"] == Expectation(here=True, vllm=True)
    assert new["c::new"] == Expectation(here=False, vllm=False, reason=UNEXPLAINED)
    assert new["b::six"] == EXPECTED["b::six"]


def test_an_update_forgets_what_is_there_no_more() -> None:
    assert update(EXPECTED, {"a::one": True}, "here") == {"a::one": EXPECTED["a::one"]}


def test_counts_are_of_both_sides() -> None:
    assert counts(EXPECTED, AS_LISTED) == {"both": 2, "vLLM only": 1, "here only": 1, "neither": 1, "varies": 1}


def test_the_list_itself_names_a_reason_for_each_test_that_does_not_pass_everywhere() -> None:
    expected = parse(LIST.read_text())
    assert len(expected) > 300
    assert not [test for test, expectation in expected.items() if expectation.reason == UNEXPLAINED]


def test_those_that_pass_on_a_side_are_selected() -> None:
    expected = {"a": Expectation(True, True), "b": Expectation(True, False), "c": Expectation(None, None)}
    assert (set(passing(expected, "here")), set(passing(expected, "vllm"))) == ({"a", "b"}, {"a"})
