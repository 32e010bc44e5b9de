"""Totals age from hours to days and out, and reports are of what was asked for."""

from __future__ import annotations

import csv
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import UsageError
from dynamo_local.core.usage.records import UsageRecord, line_of, records_in, whole_lines
from dynamo_local.core.usage.totals import (
    DAY_S,
    HOUR_S,
    HOURLY_DAYS,
    Sums,
    UsageTotals,
    as_csv,
    as_document,
    decode_totals,
    encode_totals,
    notes,
    parse_grouping,
    parse_moment,
    report,
)

DAYS = 60
RECORDS = st.builds(
    UsageRecord,
    st.floats(0, DAYS * DAY_S),
    st.sampled_from(["chat", "code"]),
    st.sampled_from([None, "a", "b"]),
    status=st.sampled_from([200, 429, 499]),
    prompt=st.integers(0, 100),
    output=st.integers(0, 100),
    seconds=st.floats(0, 10),
    requests=st.integers(0, 1),
)


def totals_of(records: list[UsageRecord]) -> UsageTotals:
    totals = UsageTotals()
    for record in records:
        totals.add(record)
    return totals


@given(st.lists(RECORDS), st.integers(0, DAYS * DAY_S), st.integers(1, DAYS))
def test_totals_keep_their_sums_as_they_age(records: list[UsageRecord], now: int, keep_days: int) -> None:
    totals = totals_of(records)
    totals.age(now, keep_days)
    again, sequence = decode_totals(encode_totals(totals, 7))
    assert (again.sums, sequence) == (totals.sums, 7)
    today = now // DAY_S
    kept = [record for record in records if record.time >= (today - keep_days) * DAY_S]
    found = report(totals).total
    assert (found.requests, found.prompt, found.output) == (
        sum(record.requests for record in kept),
        sum(record.prompt for record in kept),
        sum(record.output for record in kept),
    )
    for span in totals.sums:
        is_old = span.start < (today - HOURLY_DAYS) * DAY_S
        assert span.seconds == (DAY_S if is_old else HOUR_S)
        assert span.start % span.seconds == 0
    before = dict(totals.sums)
    totals.age(now, keep_days)
    assert totals.sums == before


@given(st.lists(RECORDS), st.sampled_from(["", "key", "endpoint,key", "day", "day,key,endpoint"]))
def test_rows_add_up_to_the_total(records: list[UsageRecord], by: str) -> None:
    totals = totals_of(records)
    totals.age(DAYS * DAY_S, DAYS)
    found = report(totals, by=parse_grouping(by))
    together = Sums()
    for row in found.rows:
        together.add(row.sums)
    assert together.requests == found.total.requests == sum(record.requests for record in records)
    assert together.prompt == found.total.prompt
    assert len({row.group for row in found.rows}) == len(found.rows)
    assert len(list(csv.reader(as_csv(found).splitlines()))) == len(found.rows) + 1


@given(st.lists(RECORDS), st.integers(0, DAYS), st.integers(0, DAYS))
def test_a_time_from_and_to_whole_days_has_all_of_it(records: list[UsageRecord], first: int, days: int) -> None:
    since, until = first * DAY_S, (first + days) * DAY_S
    found = report(totals_of(records), since, until).total
    assert found.prompt == sum(record.prompt for record in records if since <= record.time < until)


def test_a_report_says_what_it_is_of() -> None:
    records = [
        UsageRecord(5 * HOUR_S + 9, "chat", "a", prompt=7, cached=3, output=2, seconds=0.5),
        UsageRecord(6 * HOUR_S, "chat", status=499, prompt=1),
        UsageRecord(0, requests=0, lost=4),
    ]
    found = report(totals_of(records), 5 * HOUR_S + 1000, 7 * HOUR_S - 1, parse_grouping("key,day,key"))
    assert as_document(found) == {
        "object": "usage",
        "since": 5 * HOUR_S,
        "until": 7 * HOUR_S,
        "data": [
            {
                "key": None, "day": "1970-01-01", "requests": 1, "failed_requests": 1,
                "prompt_tokens": 1, "cached_tokens": 0, "output_tokens": 0, "seconds": 0.0,
            },
            {
                "key": "a", "day": "1970-01-01", "requests": 1, "failed_requests": 0,
                "prompt_tokens": 7, "cached_tokens": 3, "output_tokens": 2, "seconds": 0.5,
            },
        ],
        "total": {
            "requests": 2, "failed_requests": 1,
            "prompt_tokens": 8, "cached_tokens": 3, "output_tokens": 2, "seconds": 0.5,
        },
        "lost_records": 4,
        "damaged_records": 0,
    }  # fmt: skip
    (note,) = notes(found)
    assert "4 requests" in note


@given(st.lists(RECORDS, max_size=5), st.binary(max_size=20))
def test_records_are_read_as_they_were_written(records: list[UsageRecord], rest: bytes) -> None:
    data = b"".join(map(line_of, records))
    whole = whole_lines(data + rest.replace(b"\n", b""))
    assert whole == data
    assert (records_in(whole).records, records_in(whole).damaged) == (records, 0)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("90m", "2026-05-31T10:30:00+02:00"),
        ("1d", "2026-05-30T12:00:00+02:00"),
        ("2w", "2026-05-17T12:00:00+02:00"),
        ("2026-05-01", "2026-05-01T00:00:00+02:00"),
        ("2026-05-01T14:00", "2026-05-01T14:00:00+02:00"),
        ("2026-05-01T14:00Z", "2026-05-01T16:00:00+02:00"),
    ],
)
def test_moments_are_dates_or_so_long_ago(text: str, moment: str) -> None:
    now = datetime(2026, 5, 31, 12, tzinfo=timezone(timedelta(hours=2)))
    assert parse_moment(text, now) == datetime.fromisoformat(moment).timestamp()


@pytest.mark.parametrize("text", ["", "1", "0d", "-1d", "yesterday", "2026-13-01", "99999999999w"])
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no time"):
        parse_moment(text, datetime(2026, 5, 31, tzinfo=UTC))


def test_unknown_groupings_are_refused() -> None:
    with pytest.raises(UsageError, match="'month'"):
        parse_grouping("key,month")
