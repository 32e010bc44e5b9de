"""Properties of merging and precedence, on generated configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamo_local.sdk import load_graph
from dynamo_local.sdk.config.configuration import resolve
from dynamo_local.sdk.config.sections import merge, parse_yaml

GRAPH = load_graph("tests.unit.sdk.graphs.agg:Frontend")

names = st.text("abc", min_size=1, max_size=2)
scalars = st.none() | st.booleans() | st.integers(-9, 9) | st.text("xyz: {}[]#'\"\\\n", max_size=4)
trees = st.recursive(scalars, lambda inner: st.dictionaries(names, inner, max_size=3), max_leaves=8)
mappings = st.dictionaries(names, trees, max_size=3)
values = {
    "max-num-seqs": st.integers(1, 99),
    "gpu-share": st.floats(0, 1),
    "eager": st.booleans(),
    "model": st.text("abc7. :#", min_size=1, max_size=5),
    "revision": st.none() | st.text("ab", min_size=1),
}
sections = st.fixed_dictionaries({}, optional=values)


def leaves(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if isinstance(tree, dict) and tree:
        return {key: leaf for name, item in tree.items() for key, leaf in leaves(item, (*path, name)).items()}
    return {path: tree}


@given(mappings)
def test_merging_with_nothing_or_itself_changes_nothing(one: dict[str, Any]) -> None:
    assert merge(one, {}) == merge({}, one) == merge(one, one) == one


@given(mappings, mappings, mappings)
def test_merging_may_be_grouped_in_any_way_when_kinds_agree(a: Any, b: Any, c: Any) -> None:
    one, two, three = ({"k": {**x, "scalar": n}} for n, x in enumerate((a, b, c)))
    kinds = [{path[:i] for path in leaves(x) for i in range(len(path))} for x in (one, two, three)]
    ends = [set(leaves(x)) for x in (one, two, three)]
    if any(ends[i] & kinds[j] for i in range(3) for j in range(3)):
        return  # a scalar in one is a mapping in another: replacing is not associative, and need not be
    assert merge(merge(one, two), three) == merge(one, merge(two, three))


@given(mappings, mappings)
def test_every_leaf_of_the_winner_is_in_the_merged(base: dict[str, Any], over: dict[str, Any]) -> None:
    merged = merge(base, over)
    for path, leaf in leaves(over).items():
        found: Any = merged
        for name in path:
            found = found[name]
        if leaf != {}:
            assert found == leaf


@given(mappings, mappings)
def test_merging_leaves_its_arguments_alone(base: dict[str, Any], over: dict[str, Any]) -> None:
    before = json.dumps([base, over])
    merge(base, over)
    assert json.dumps([base, over]) == before


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(common=sections, own=sections, typed_common=sections, typed=sections)
def test_a_later_layer_wins_key_by_key(tmp_path: Path, common: Any, own: Any, typed_common: Any, typed: Any) -> None:
    path = tmp_path / "c.yaml"
    worker = {"common-configs": list(values), **own}
    path.write_text(json.dumps({"Common": common, "Worker": worker}))  # JSON is YAML
    options = [f"--Common.{key}={json.dumps(value)}" for key, value in typed_common.items()]
    options += [f"--Worker.{key}={json.dumps(value)}" for key, value in typed.items()]
    resolved = resolve(GRAPH, path, options)
    assert resolved.service("Worker").config == {**common, **own, **typed_common, **typed}


@given(mappings)
def test_an_option_with_a_path_is_the_same_as_one_with_a_mapping(extra: dict[str, Any]) -> None:
    whole = resolve(GRAPH, overrides=[f"--Worker.extra={json.dumps(extra)}"])
    options = [f"--Worker.{'.'.join(('extra', *p))}={json.dumps(leaf)}" for p, leaf in leaves(extra).items()]
    assert resolve(GRAPH, overrides=options).service("Worker").config == whole.service("Worker").config


@given(trees)
def test_json_is_read_as_yaml(tree: Any) -> None:
    assert parse_yaml(json.dumps(tree), "test") == tree
