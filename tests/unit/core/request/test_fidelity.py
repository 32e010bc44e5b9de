"""What survives a new epoch where state can be rebuilt, and where not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.request.recovery import LOST, Fidelity, Survival

names = st.sampled_from(["seed", "structured_outputs", "other"])
some = st.lists(names, unique=True).map(tuple)


@given(st.sampled_from([Fidelity.EXACT, Fidelity.DISTRIBUTION]), some, some)
def test_what_has_to_be_rebuilt_and_cannot_be_is_lost(
    fidelity: Fidelity, rebuilt: tuple[str, ...], forgotten: tuple[str, ...]
) -> None:
    survival = Survival(fidelity, "temperature", rebuilt)
    after = survival.without(forgotten)
    lost = set(rebuilt) & set(forgotten)
    assert (after.fidelity is Fidelity.NONE) == bool(lost)
    assert after.because_of in lost if lost else after == survival
    assert after.without(forgotten) == after


def test_what_is_lost_anyway_is_lost_for_the_same_reason() -> None:
    assert LOST.without(["seed"]) == LOST
    assert Survival(Fidelity.NONE, "extra_args", ("seed",)).without(["seed"]).because_of == "extra_args"
