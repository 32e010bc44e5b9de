"""What a key says of itself: by which secrets it is known, until when, and what it may use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.keys.values import ApiKey, FormerSecret, digest_of

TIMES = st.floats(0, 4e9)


def key(**fields: object) -> ApiKey:
    return ApiKey(**({"name": "a", "digest": "now", "number": 1, "slot": 0, "created_at": 0.0} | fields))  # type: ignore[arg-type]


@given(TIMES, TIMES)
def test_a_former_secret_is_known_until_its_time_is_over(until: float, now: float) -> None:
    rotated = key(former=FormerSecret("before", until))
    assert rotated.digests(now) == (("now", "before") if now < until else ("now",))
    assert key().digests(now) == ("now",)


@given(TIMES, TIMES)
def test_a_key_with_an_end_has_expired_from_then_on(expires: float, now: float) -> None:
    assert (now >= key(expires_at=expires).valid_until("now")) is (now >= expires)
    assert now < key().valid_until("now")


def test_without_a_list_a_key_may_use_every_endpoint() -> None:
    assert [key().allows(name) for name in ("chat", "")] == [True, True]
    some = key(endpoints=("chat",))
    assert [some.allows(name) for name in ("chat", "code", "")] == [True, False, False]


def test_secrets_of_other_bytes_have_other_digests() -> None:
    assert digest_of(b"a") != digest_of(b"b")
    assert len(digest_of(b"\xff")) == 64
