"""Whatever arrives in whatever order: each output position is taken once, in order, and from the right worker."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.messages.work import Array, RequestEpoch, TokenDelta
from dynamo_local.core.request.log import RequestLog, Verdict

POOLED = Array("float32", (2,), bytes(8))
OUTPUT = list(range(1000, 1012))
"""The right tokens: OUTPUT[i] stands at position i. Fenced-off epochs send others."""


def delta(position: int, *token_ids: int, epoch: int = 1, finish: str | None = None) -> TokenDelta:
    return TokenDelta("r", epoch, position, list(token_ids), finish=finish)  # type: ignore[arg-type]


def assigned(*tokens: int, epoch: int = 1) -> RequestLog:
    log = RequestLog("r", [1, 2, 3], tokens=list(tokens))
    while log.epoch < epoch:
        log.assign(f"worker-{log.epoch + 1}")
    return log


@st.composite
def _slices(draw: st.DrawFn) -> TokenDelta:
    """A piece of the output, as some epoch's worker would send it: only the third sends the right tokens."""
    start = draw(st.integers(0, len(OUTPUT)))
    end = draw(st.integers(start, len(OUTPUT)))
    epoch = draw(st.sampled_from([1, 2, 3, 3, 3]))
    token_ids = OUTPUT[start:end] if epoch == 3 else [-token for token in OUTPUT[start:end]]
    return delta(start, *token_ids, epoch=epoch, finish="stop" if end == len(OUTPUT) else None)


@given(st.lists(_slices(), max_size=40))
def test_any_stream_yields_each_position_once_in_order_or_a_gap(stream: list[TokenDelta]) -> None:
    log, passed_on, finishes = assigned(epoch=3), list[int](), 0
    for piece in stream:
        before = log.position
        verdict, known = log.accept(piece)
        if verdict is Verdict.ACCEPTED:
            passed_on += piece.token_ids[known:]
            finishes += piece.finish is not None
        else:
            assert log.position == before
            assert verdict is not Verdict.GAP or piece.position > before
        assert (verdict is Verdict.STALE) == (piece.epoch != 3)
    assert passed_on == log.tokens == OUTPUT[: len(passed_on)]
    assert finishes <= 1


@given(st.lists(_slices(), max_size=15))
def test_after_any_stream_the_missing_rest_completes_the_log(stream: list[TokenDelta]) -> None:
    log = assigned(epoch=3)
    for piece in stream:
        log.accept(piece)
    verdict, _ = log.accept(delta(log.position, *OUTPUT[log.position :], epoch=3, finish="stop"))
    assert log.tokens == OUTPUT
    assert log.finished
    assert verdict in (Verdict.ACCEPTED, Verdict.DUPLICATE)


def _one_by_one(start: int, epoch: int) -> Iterator[TokenDelta]:
    for position in range(start, len(OUTPUT)):
        yield delta(position, OUTPUT[position], epoch=epoch)


@given(st.lists(st.integers(0, 4), max_size=4))
def test_a_request_that_changes_workers_is_never_doubled(counts: list[int]) -> None:
    """Each worker brings some tokens, then the next takes over; the earlier ones go on sending."""
    log, earlier = assigned(), list[Iterator[TokenDelta]]()
    for count in counts:
        epoch, at = log.epoch, log.position
        sent = _one_by_one(at, epoch)
        for _, piece in zip(range(count), sent, strict=False):
            assert log.accept(piece) == (Verdict.ACCEPTED, 0)
        log.assign("next")
        earlier.append(sent)
    for sent in earlier:
        assert all(log.accept(piece) == (Verdict.STALE, 0) for piece in sent)
    assert log.tokens == OUTPUT[: log.position]


def test_a_piece_that_overlaps_brings_only_what_is_new() -> None:
    log = assigned(10, 11)
    assert log.accept(delta(1, 11, 12, 13)) == (Verdict.ACCEPTED, 1)
    assert log.tokens == [10, 11, 12, 13]


def test_a_gap_is_told_and_changes_nothing() -> None:
    log = assigned(10)
    assert log.accept(delta(2, 12)) == (Verdict.GAP, 0)
    assert log.tokens == [10]


def test_a_finish_without_tokens_counts_where_the_log_ends() -> None:
    log = assigned(10, 11)
    assert log.accept(delta(1, finish="abort"))[0] is Verdict.DUPLICATE
    assert not log.finished
    assert log.accept(delta(3, finish="abort"))[0] is Verdict.GAP
    assert log.accept(delta(2, finish="abort"))[0] is Verdict.ACCEPTED
    assert log.finished


def test_a_failure_counts_wherever_its_worker_believes_the_request_to_be() -> None:
    for position in (0, 2, 7):
        log = assigned(10, 11)
        assert log.accept(delta(position, finish="error"))[0] is Verdict.ACCEPTED
        assert log.tokens == [10, 11]


def test_a_failure_brings_no_tokens() -> None:
    log = assigned(10)
    verdict, known = log.accept(delta(1, 11, 12, finish="error"))
    assert (verdict, known, log.tokens) == (Verdict.ACCEPTED, 2, [10])


def test_nothing_is_accepted_after_the_end() -> None:
    for end in (delta(1, 11, finish="stop"), delta(0, finish="error")):
        log = assigned(10)
        log.accept(end)
        tokens = list(log.tokens)
        assert log.accept(delta(log.position, 99)) == (Verdict.DUPLICATE, 0)
        assert log.accept(end) == (Verdict.DUPLICATE, 0)
        assert log.tokens == tokens


def test_before_the_first_assignment_everything_is_stale() -> None:
    assert RequestLog("r", [1]).accept(delta(0, 10, epoch=0)) == (Verdict.STALE, 0)


def test_each_assignment_mints_the_next_epoch() -> None:
    log = RequestLog("r", [1])
    assert [log.assign(worker) for worker in "abc"] == [RequestEpoch("r", n) for n in (1, 2, 3)]
    assert (log.worker, log.current) == ("c", RequestEpoch("r", 3))


def test_one_loss_has_one_consequence() -> None:
    log = assigned(epoch=2)
    assert log.give_up(1) is None
    assert log.give_up(2) == "worker-2"
    assert log.give_up(2) is None
    assert log.accept(delta(0, 10, epoch=2)) == (Verdict.STALE, 0)
    log.assign("next")
    assert log.accept(delta(0, 10, epoch=3)) == (Verdict.ACCEPTED, 0)


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=20), st.integers(1, 4))
def test_a_pooled_output_is_taken_once_and_from_the_current_epoch(sent: list[tuple[int, bool]], current: int) -> None:
    """It comes whole, with the end of its request, and without tokens. Signs of life come before it."""
    log, taken = assigned(epoch=current), list[TokenDelta]()
    for epoch, ends in sent:
        piece = TokenDelta("r", epoch, 0, [], finish="stop" if ends else None, pooled=POOLED if ends else None)
        verdict, known = log.accept(piece)
        assert (verdict is Verdict.STALE) == (epoch != current)
        taken += [piece] * (verdict is Verdict.ACCEPTED and known == 0)
    assert [piece.pooled for piece in taken] == [POOLED] * ((current, True) in sent)
    assert (log.tokens, log.finished) == ([], (current, True) in sent)
