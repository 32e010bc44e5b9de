"""Names: what a builder builds, its parser takes apart; anything else is refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import ConfigError, UsageError
from dynamo_local.core.names import (
    Revision,
    Watcher,
    check_namespace,
    check_service,
    parse_revision,
    parse_watcher,
    select_watcher,
    short_watcher,
)
from dynamo_local.core.subjects import Subjects, revision_in

namespaces = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9-]{0,38}[A-Za-z0-9])?", fullmatch=True)
services = st.from_regex(r"[A-Z][A-Za-z0-9]{0,20}", fullmatch=True)
endpoints = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", fullmatch=True)
revisions = st.builds(Revision, endpoints, st.integers(1, 10**6))
scopes = st.just("") | revisions.map(str)
watchers = st.builds(Watcher, namespace=namespaces, service=services, index=st.integers(0, 10**9 - 1), revision=scopes)


@given(watchers)
def test_a_watcher_is_parsed_from_its_name(watcher: Watcher) -> None:
    assert parse_watcher(str(watcher)) == watcher


@given(st.text(max_size=30) | st.from_regex(r"[a-z-]*_[A-Z]?[a-z]*(_[0-9]*)*", fullmatch=True))
def test_a_parsed_name_is_spelled_the_same_again(name: str) -> None:
    try:
        watcher = parse_watcher(name)
    except ConfigError:
        return
    assert str(watcher) == name


@pytest.mark.parametrize(
    "name",
    ["", "dynamo", "dynamo_", "_VllmWorker", "dynamo_vllm", "dynamo_A_0", "dynamo_A_01", "dynamo_A_-1", "dynamo_A_",
     "dynamo_A_1_1", "dynamo_A\n", "dyn.amo_A", "dynamo_A_" + "9" * 5000, "dynamo_Ä", "dynamo_A_\u0663"],
)  # fmt: skip
def test_other_names_are_no_watchers(name: str) -> None:
    with pytest.raises(ConfigError):
        parse_watcher(name)


@given(revisions)
def test_a_revision_is_parsed_from_its_text(revision: Revision) -> None:
    assert parse_revision(str(revision)) == revision


@pytest.mark.parametrize("text", ["", "chat", "chat@", "chat@0", "chat@02", "Chat@1", "chat@1@1", "a.b@1", "chat@1\n"])
def test_other_texts_are_no_revisions(text: str) -> None:
    with pytest.raises(ConfigError, match="revision"):
        parse_revision(text)


@given(namespaces)
def test_good_namespaces_pass(namespace: str) -> None:
    assert check_namespace(namespace) == namespace


@pytest.mark.parametrize("namespace", ["", "-a", "a-", "a.b", "a_b", "a b", "a*", "a>", "a" * 41, "a\n", "ä", "../a"])
def test_bad_namespaces_are_refused(namespace: str) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        check_namespace(namespace)


@pytest.mark.parametrize("service", ["", "worker", "A_B", "A.B", "A-B", "1A", "A" * 65, "A\n"])
def test_bad_service_names_are_refused(service: str) -> None:
    with pytest.raises(ConfigError, match="service"):
        check_service(service)


def _subjects(namespace: str, watcher: str, lease: str) -> list[str]:
    of = Subjects(namespace)
    return [*_subjects_among(of, watcher, lease), of.planner, of.events, of.board]


def _subjects_among(of: Subjects, watcher: str = "w", lease: str = "lease") -> list[str]:
    """The subjects on which the processes of one model talk among themselves."""
    return [
        of.presence(watcher, "frontend"), of.presence(watcher, "decode"), of.presences, of.presences_of_frontends,
        of.probe, of.probe_of_frontends, of.revoked, of.lost, of.work(lease), of.tokens(lease), of.assign,
        of.account, of.cached(lease), of.pin(lease), of.role(lease), of.migrations(lease),
        of.requests(lease), of.claims(lease), of.prefill_jobs("high"), of.call("Middle", "generate"),
        of.call_control(lease),
    ]  # fmt: skip


@given(watchers, st.from_regex(r"[0-9a-f]{16}", fullmatch=True))
def test_subjects_are_distinct_and_legal(watcher: Watcher, lease: str) -> None:
    subjects = _subjects(watcher.namespace, str(watcher), lease)
    assert len(set(subjects)) == len(subjects)
    for subject in subjects:
        assert re.fullmatch(r"dyn\.[^.]+(\.[A-Za-z0-9_@-]+)+(\.\*){0,2}", subject)


@given(namespaces, namespaces)
def test_namespaces_never_meet(one: str, other: str) -> None:
    if one != other:
        mine, theirs = _subjects(one, "w", "lease"), _subjects(other, "w", "lease")
        assert not set(mine) & set(theirs)


@given(namespaces, scopes, scopes)
def test_models_never_meet(namespace: str, one: str, other: str) -> None:
    mine, theirs = Subjects(namespace, one), Subjects(namespace, other)
    assert {revision_in(subject) for subject in _subjects_among(mine)} == {one}
    if one == other:
        return
    assert mine.prefill_stream != theirs.prefill_stream
    for pattern in _subjects_among(mine):
        heard = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        assert not any(heard.fullmatch(subject) for subject in _subjects_among(theirs)), pattern


@pytest.mark.parametrize("role", ["frontend", "router", "decode", "prefill"])
def test_presences_of_frontends_can_be_heard_alone(role: str) -> None:
    of = Subjects("dynamo")
    kind, watcher = of.presence("w", role).split(".")[-2:]
    assert of.presences == of.presence("*", role).replace(kind, "*")
    assert (of.presences_of_frontends == of.presence("*", role)) == (role == "frontend")
    assert watcher == "w"


@given(watchers)
def test_a_watcher_may_be_named_without_its_namespace(watcher: Watcher) -> None:
    known = [str(watcher), f"{watcher.namespace}_Other"]
    assert select_watcher(str(watcher), known) == select_watcher(short_watcher(str(watcher)), known) == str(watcher)


@given(watchers)
def test_a_short_name_is_never_a_full_one(watcher: Watcher) -> None:
    short = short_watcher(str(watcher))
    assert short_watcher(short) == short
    with pytest.raises(ConfigError):
        parse_watcher(short)


def test_an_unknown_watcher_names_those_there_are() -> None:
    with pytest.raises(UsageError, match="there is no worker 'X'; there are: W, W_1"):
        select_watcher("X", ["n_W", "n_W_1"])
    with pytest.raises(UsageError, match="there is no worker 'n_X'; there are: none"):
        select_watcher("n_X", [])
    with pytest.raises(UsageError, match="m_W belongs to namespace m, not to n; add --namespace m"):
        select_watcher("m_W", ["n_W"])
