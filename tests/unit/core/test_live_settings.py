"""The registry of live settings: what is refused, in which words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import UsageError
from dynamo_local.core.live_settings import SETTINGS, LiveSetting, LiveSettings, setting

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
        setting("max-local-prefill-length").parse(text)
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


def test_settings_that_are_set_replace_those_that_are_configured() -> None:
    configured = LiveSettings(max_prefill_queue_size=7, rebalance=True)
    assert configured.changed({}) == configured
    changed = configured.changed({"rebalance": 0, "rebalance-below": 50})
    assert changed == LiveSettings(max_prefill_queue_size=7, rebalance=False, rebalance_below=50)
    assert changed.rebalance is False
    with pytest.raises(UsageError, match="there is no live setting"):
        configured.changed({"seed": 1})


def test_a_switch_is_0_or_1() -> None:
    assert [setting("rebalance").parse(text) for text in ("0", "1")] == [0, 1]
    with pytest.raises(UsageError, match="whole number from 0 to 1"):
        setting("rebalance").parse("2")
