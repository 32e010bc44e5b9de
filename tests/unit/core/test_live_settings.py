"""The registry of live settings: what is refused, in which words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import UsageError
from dynamo_local.core.live_settings import MAX_LOCAL_PREFILL_LENGTH, SETTINGS, LiveSetting, setting

known = st.sampled_from(sorted(SETTINGS.values(), key=lambda each: each.name))


def test_an_unknown_setting_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError) as failure:
        setting("max-local-prefill")
    assert all(name in str(failure.value) for name in SETTINGS)


@pytest.mark.parametrize(
    "text", ["", " ", "-1", "1.5", "1e3", "0x10", "many", "1 2", "²", "٣", "2147483648", "9" * 5000, "1_000"]
)
def test_what_is_no_value_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(UsageError, match="whole number from 0 to 2147483647") as failure:
        MAX_LOCAL_PREFILL_LENGTH.parse(text)
    assert len(str(failure.value)) < 200


@given(known, st.text() | st.integers().map(str))
def test_a_value_is_within_its_bounds_or_refused(each: LiveSetting, text: str) -> None:
    try:
        value = each.parse(text)
    except UsageError:
        return
    assert each.minimum <= value <= each.maximum
    assert each.parse(str(value)) == value


@given(known, st.data())
def test_every_value_within_the_bounds_is_allowed(each: LiveSetting, data: st.DataObject) -> None:
    value = data.draw(st.integers(each.minimum, each.maximum))
    assert each.parse(str(value)) == each.parse(f" {value}\n") == value


@pytest.mark.parametrize("each", SETTINGS.values(), ids=lambda each: each.name)
def test_a_default_is_a_value(each: LiveSetting) -> None:
    assert each.parse(str(each.default)) == each.default
    assert setting(each.name) is each
