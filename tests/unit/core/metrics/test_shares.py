"""The metrics of several frontends, shown by any of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core import codec
from dynamo_local.core.messages.reports import MetricFamily, MetricSample, MetricsAnswer, MetricShare
from dynamo_local.core.metrics.shares import MOST_ENDED, counters, ended_together, later, together
from dynamo_local.monitor.metrics import across_frontends

VALUES = st.integers(0, 1_000).map(float)
LEASES = st.sampled_from("abcd")


def counter(values: dict[str, float], name: str = "vllm:prompt_tokens") -> MetricFamily:
    samples = (MetricSample(f"{name}_total", (("model_name", model),), value) for model, value in values.items())
    return MetricFamily(name, "counter", "Tokens", tuple(samples))


def gauge(value: float, name: str) -> MetricFamily:
    return MetricFamily(name, "gauge", "Something", (MetricSample(name, (), value),))


def values(families: tuple[MetricFamily, ...]) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float] = {}
    for family in families:
        for sample in family.samples:
            series = sample.name, *(value for _, value in sample.labels)
            assert series not in found
            found[series] = sample.value
    return found


counter_values = st.dictionaries(st.sampled_from("xyz"), VALUES)
shares = counter_values.map(lambda each: MetricShare((counter(each),), (counter(each, "dynamo_usage_prompt_tokens"),)))


@given(st.lists(counter_values, min_size=1))
def test_whoever_is_asked_counters_are_the_sum_of_all(each: list[dict[str, float]]) -> None:
    families = [(counter(one),) for one in each]
    found = values(together(families, across_frontends))
    models = {model for one in each for model in one}
    assert found == {
        ("vllm:prompt_tokens_total", model): sum(one.get(model, 0) for one in each) for model in sorted(models)
    }
    assert found == values(together(reversed(families), across_frontends))


def test_gauges_go_by_rule_and_what_one_does_not_know_another_one_tells() -> None:
    def shown(*shares: tuple[MetricFamily, ...]) -> dict[tuple[str, ...], float]:
        return values(together(shares, across_frontends))

    in_flight = "dynamo_frontend_requests_in_flight"
    assert shown((gauge(2, in_flight),), (gauge(3, in_flight),)) == {(in_flight,): 5}
    assert shown((gauge(2, "dynamo_planner_devices"),), (gauge(3, "dynamo_planner_devices"),)).popitem()[1] == 2
    assert shown((), (gauge(3, "dynamo_planner_devices"),)).popitem()[1] == 3
    starts = [(counter({"Worker": number}, "dynamo_process_starts"),) for number in (1, 4)]
    assert shown(*starts).popitem()[1] == 4


def test_a_family_began_when_the_first_of_them_did() -> None:
    def of(created: float) -> tuple[MetricFamily, ...]:
        return (
            MetricFamily("a", "counter", "", (MetricSample("a_total", (), 1), MetricSample("a_created", (), created))),
        )

    assert values(together([of(7), of(5)], across_frontends)) == {("a_total",): 2, ("a_created",): 5}


def test_only_what_never_falls_is_kept_of_a_frontend_that_has_ended() -> None:
    histogram = MetricFamily("vllm:ttft", "histogram", "", (MetricSample("vllm:ttft_sum", (), 0.5),))
    share = MetricShare(
        (
            counter({"x": 3, "y": 0}),
            gauge(2, "dynamo_frontend_requests_in_flight"),
            histogram,
            counter({"Worker": 2}, "dynamo_process_starts"),
        )
    )
    kept = counters(share, across_frontends)
    assert values(kept.families) == {("vllm:prompt_tokens_total", "x"): 3, ("vllm:ttft_sum",): 0.5}


@given(shares, shares)
def test_of_what_two_know_of_a_third_the_later_counts(one: MetricShare, other: MetricShare) -> None:
    found = later(one, other)
    assert values(found.families) == values(later(other, one).families)
    assert values(later(found, one).families) == values(found.families)
    for known in (one, other):
        for series, value in values(known.families).items():
            assert values(found.families)[series] >= value


@given(st.dictionaries(LEASES, shares), st.dictionaries(LEASES, shares), st.sets(LEASES))
def test_what_is_known_of_those_that_ended_is_exchanged(
    known: dict[str, MetricShare], told: dict[str, MetricShare], living: set[str]
) -> None:
    found = ended_together(known, told, living)
    assert set(found) == (set(known) | set(told)) - living
    assert {lease: values(share.families) for lease, share in ended_together(found, told, living).items()} == {
        lease: values(share.families) for lease, share in found.items()
    }


def test_not_all_that_ever_ended_are_kept() -> None:
    known: dict[str, MetricShare] = {}
    for number in range(2 * MOST_ENDED):
        known = ended_together(known, {f"lease{number}": MetricShare()}, ())
    assert list(known) == [f"lease{number}" for number in range(MOST_ENDED, 2 * MOST_ENDED)]


@given(shares, st.dictionaries(LEASES, shares))
def test_an_answer_is_what_it_was_behind_the_bus(own: MetricShare, ended: dict[str, MetricShare]) -> None:
    answer = MetricsAnswer(own, ended)
    assert codec.decode(codec.encode(answer), MetricsAnswer) == answer
