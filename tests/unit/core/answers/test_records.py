"""Journals that were cut or damaged are read up to there, and what is not on the disk is not shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.answers.records import Kind, Record, record, records_in, shown

RECORDS = st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=30)), max_size=8)


def journal(records: list[tuple[Kind, bytes]]) -> bytes:
    return b"".join(record(kind, content) for kind, content in records)


@given(RECORDS, st.integers(0, 400))
def test_a_journal_that_was_cut_is_read_up_to_its_last_whole_record(
    records: list[tuple[Kind, bytes]], length: int
) -> None:
    data = journal(records)
    found = records_in(data[:length])
    assert [(each.kind, each.content) for each in found] == records[: len(found)]
    whole = len(journal(records[: len(found)]))
    assert whole == (found[-1].end if found else 0)
    assert len(found) == len(records) or len(journal(records[: len(found) + 1])) > length


@given(RECORDS.filter(bool), st.data())
def test_damage_at_any_byte_is_noticed(records: list[tuple[Kind, bytes]], data: st.DataObject) -> None:
    whole = bytearray(journal(records))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    found = records_in(bytes(whole))
    assert len(found) < len(records)
    assert [(each.kind, each.content) for each in found] == records[: len(found)]


@given(RECORDS, RECORDS)
def test_reading_goes_on_where_it_has_ended(first: list[tuple[Kind, bytes]], second: list[tuple[Kind, bytes]]) -> None:
    begin, rest = journal(first), journal(second)
    assert records_in(begin) + records_in(rest, len(begin)) == records_in(begin + rest)


def test_what_is_behind_the_last_mark_is_not_shown() -> None:
    one, mark, two = Record(Kind.EVENT, b"1", 0), Record(Kind.SYNCED, b"", 0), Record(Kind.EVENT, b"2", 0)
    assert list(shown([one, mark, two])) == [one, mark]
    assert list(shown([one, two])) == []
    assert list(shown([one, mark, two, mark])) == [one, mark, two, mark]
