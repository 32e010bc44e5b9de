"""Notes on a run: sentences that qualify its figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dynamo_local.load.results.figures import Figures
from dynamo_local.load.results.records import NOT_SENT, Record

_LATE_S = 0.020
_BUSY_SHARE = 0.8
_FEW = 200
_OFF_SHARE = 0.01
_UNDER_WAY_SHARE = 0.2


def notes(figures: Figures, records: Sequence[Record], client_cpu_share: float, *, is_closed: bool) -> list[str]:
    """Return the notes on these figures, the most important first. `records`: the requests after the warm-up."""
    completed = [record for record in records if record.is_completed]
    found = [*_about_the_generator(figures, client_cpu_share), *_about_the_answers(completed, figures)]
    if not is_closed:
        found += _about_the_load(figures, records)
    if 0 < figures.completed < _FEW:
        found.append(f"with {figures.completed} answers p99 says little more than the slowest one")
    return found


def _about_the_generator(figures: Figures, client_cpu_share: float) -> Iterator[str]:
    if not_sent := figures.errors.get(NOT_SENT):
        yield (
            f"{not_sent} requests were not sent, because --max-in-flight requests were in flight; they count as failed"
        )
    lag = figures.lag_s
    if lag is not None and lag.p99 > _LATE_S:
        yield (
            f"the generator was late: p99 {lag.p99 * 1e3:.0f} ms, at most {lag.max * 1e3:.0f} ms; arrivals differ "
            "from the plan, and answers may have been read late too"
        )
    if client_cpu_share > _BUSY_SHARE:
        yield (
            f"the generator used {client_cpu_share:.0%} of a core: latencies are partly its own; use a lower rate or "
            "several generators"
        )


def _about_the_load(figures: Figures, records: Sequence[Record]) -> Iterator[str]:
    end_s = max((record.at_s for record in records), default=0.0)
    under_way = sum(
        record.sent_s is not None and (record.ended_s is None or record.ended_s > end_s) for record in records
    )
    if figures.planned >= 20 and under_way > _UNDER_WAY_SHARE * figures.planned:
        yield (
            f"{under_way} of {figures.planned} requests were still in flight when the last one was sent: the server "
            "cannot keep up or the load was too short, and the latencies depend on its duration"
        )


def _about_the_answers(completed: Sequence[Record], figures: Figures) -> Iterator[str]:
    other = sum(record.tokens != record.output_tokens for record in completed)
    if other > _OFF_SHARE * len(completed):
        yield f"{other} of {len(completed)} answers do not have the requested number of tokens"
    counted = [(record.prompt_tokens, record.input_tokens) for record in completed if record.prompt_tokens is not None]
    if len(counted) < len(completed):
        yield "the server did not count tokens: each chunk counts as one"
    there, asked = sum(there for there, _ in counted), sum(asked for _, asked in counted)
    if asked and abs(there / asked - 1) > _OFF_SHARE:
        yield f"the server counted {there / asked:.2f} times the prompt tokens that were requested"
    if figures.tokens_per_chunk is not None and figures.tokens_per_chunk > 1 + _OFF_SHARE:
        yield f"chunks held {figures.tokens_per_chunk:.2f} tokens on average: gaps are between chunks, not tokens"
