"""Callbacks: addresses, URLs, signatures and pauses."""

from __future__ import annotations

import ipaddress

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.async_tasks.callbacks import (
    MOST_ATTEMPTS,
    CallbackAuth,
    checked_auth,
    chosen,
    headers_of,
    is_last,
    may_be_called,
    networks_of,
    pause_s,
    payload_of,
    secret_of,
    secret_text,
    target_of,
)
from dynamo_local.core.async_tasks.records import Task, TaskHead, TaskResult
from dynamo_local.core.errors import ConfigError

HEAD = TaskHead(
    task="task_" + "a" * 32, model="chat", path="/v1/completions", priority=100, created_at=1, callback_url="http://r/"
)
TASK = Task(HEAD, b"{}", result=TaskResult(200, b'{"x": 1}', 2))
NOWHERE = (
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
    *("255.255.255.255", "::", "::1", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1"),
    *("2002:7f00:1::", "2001:db8::1"),
)


@pytest.mark.parametrize("text", NOWHERE)
def test_addresses_that_are_not_public_are_called_where_allowed_alone(text: str) -> None:
    address = ipaddress.ip_address(text)
    assert not may_be_called(address, ())
    assert may_be_called(address, [ipaddress.ip_network(text)])


@given(st.ip_addresses())
def test_only_public_addresses_may_be_called(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    if may_be_called(address, ()):
        assert address.is_global or isinstance(address, ipaddress.IPv6Address)
        assert not address.is_multicast
        mapped = getattr(address, "ipv4_mapped", None)
        assert mapped is None or mapped.is_global


@given(st.ip_addresses(v=4))
def test_an_address_in_another_form_is_the_same_address(address: ipaddress.IPv4Address) -> None:
    mapped, translated = (ipaddress.IPv6Address(int(address) + (0xFFFF << 32)), f"64:ff9b::{address}")
    assert may_be_called(mapped, ()) == may_be_called(address, ())
    assert may_be_called(ipaddress.ip_address(translated), ()) == may_be_called(address, ())


def test_of_several_addresses_one_that_may_be_called_is_chosen() -> None:
    assert chosen("r", ["127.0.0.1", "8.8.8.8"], ()) == "8.8.8.8"
    assert chosen("r", ["::1", "127.0.0.1"], networks_of("127.0.0.0/8")) == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"r is 127\.0\.0\.1, where callbacks may not go"):
        chosen("r", ["127.0.0.1"], ())
    with pytest.raises(ConfigError, match="callback-allow"):
        networks_of("everywhere")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://r/", "scheme"),
        ("file:///etc/passwd", "scheme"),
        ("r/x", "scheme"),
        ("http://", "no host"),
        ("http://user:pass@r/", "callback_auth"),
        ("http://r:99999/", "[Pp]ort"),
        ("http://r:0/", "port"),
        ("http://r/\r\nx: y", "characters"),
        ("http://r\\@s/", "characters"),
        ("http://r/é", "characters"),
        ("http://r%2e/", "no host"),
        ("http://[::1/", "."),
        ("http://r/" + "x" * 3000, "2048"),
    ],
)
def test_wrong_urls_are_named(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        target_of(url)


def test_where_a_url_goes() -> None:
    assert target_of("https://r.example/a?b=c#d") == (True, "r.example", 443, "/a?b=c")
    assert target_of("http://[::1]:8080").origin == "http://[::1]:8080"


def test_basic_authentication_alone() -> None:
    assert checked_auth(CallbackAuth("basic", "u", "p")).header() == "Basic dTpw"
    for wrong in (CallbackAuth("mtls"), CallbackAuth("basic"), CallbackAuth("basic", "u:v", "p")):
        with pytest.raises(ConfigError, match="callback_auth"):
            checked_auth(wrong)


def test_openais_client_verifies_a_signature_and_refuses_another_owners() -> None:
    payload, master, now = payload_of(TASK), b"m" * 32, 1_700_000_000
    mine, others = secret_of(master, "alice#1"), secret_of(master, "bob#1")
    headers = headers_of(TASK, payload, mine, now)
    webhooks = openai.OpenAI(api_key="none").webhooks
    webhooks.verify_signature(payload, headers, secret=secret_text(mine), tolerance=10**10)
    for body, secret in ((payload + b" ", mine), (payload, others)):
        with pytest.raises(openai.InvalidWebhookSignatureError):
            webhooks.verify_signature(body, headers, secret=secret_text(secret), tolerance=10**10)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        webhooks.verify_signature(payload, headers, secret=secret_text(mine))


def test_pauses_grow_and_end_within_two_days() -> None:
    pauses = [pause_s(number) for number in range(1, MOST_ATTEMPTS + 1)]
    known = [each for each in pauses if each is not None]
    assert known == sorted(known)
    assert known[0] == 5
    assert pauses[-1] is None
    assert len(known) == MOST_ATTEMPTS - 1
    assert 12 * 3600 < sum(known) < 48 * 3600
    assert [is_last(status) for status in (200, 204, 302, 410, 429, 500)] == [True, True, False, True, False, False]


@pytest.mark.parametrize(
    "text",
    [
        "64:ff9b:1::a9fe:a9fe",
        "::10.0.0.1",
        "::ffff:0:127.0.0.1",
        "fec0::1",
        "3fff::1",
        "192.0.0.192",
        "168.63.129.16",
        "::ffff:168.63.129.16",
    ],
)
def test_what_only_seems_public_may_not_be_called(text: str) -> None:
    assert not may_be_called(ipaddress.ip_address(text), ())
