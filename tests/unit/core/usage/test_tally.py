"""A tally counts each prompt once, and every token of output."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.usage.records import Tally

SIZES = st.integers(0, 1000)


@given(st.dictionaries(st.sampled_from("abcd"), st.tuples(SIZES, SIZES)), st.data())
def test_prompts_count_once_and_outputs_always(prompts: dict[str, tuple[int, int]], data: st.DataObject) -> None:
    names = st.sampled_from(sorted(prompts)) if prompts else st.nothing()
    outputs = data.draw(st.lists(st.tuples(names, SIZES), max_size=0 if not prompts else 20))
    tally = Tally()
    for name, output in outputs:
        tally.add(name, *prompts[name], output)
    computed = [prompts[name] for name in {name for name, _ in outputs}]
    assert tally.prompt == sum(prompt for prompt, _ in computed)
    assert tally.cached == sum(min(prompt, cached) for prompt, cached in computed) <= tally.prompt
    assert tally.output == sum(output for _, output in outputs)
    assert tally.total == tally.prompt + tally.output


def test_what_the_client_was_told_holds() -> None:
    tally = Tally(prompt=100, cached=50, output=9)
    tally.replace(10, 4)
    assert (tally.prompt, tally.cached, tally.output) == (10, 10, 4)
