from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import GraphError
from dynamo_local.sdk import Service, depends, load_graph, service, spec_of
from dynamo_local.sdk.graph import build_graph, dependency_order, import_service, target_of

HERE = "tests.unit.sdk.graphs"


def names(graph: str) -> tuple[str, ...]:
    return tuple(spec_of(cls).name for cls in load_graph(graph).services)


def test_without_links_every_dependency_is_kept() -> None:
    graph = load_graph(f"{HERE}.unlinked:Frontend")
    assert [cls.__name__ for cls in graph.services] == ["Prefill", "Worker", "Router", "Frontend"]
    assert graph.edges["Frontend"] == ("Router", "Worker")
    assert graph.root.__name__ == "Frontend"


def test_links_prune_on_both_ends_and_do_not_leak_between_graph_modules() -> None:
    for _ in range(2):  # loading one must not change what the other one is
        assert names(f"{HERE}.agg:Frontend") == ("Worker", "Frontend")
        assert names(f"{HERE}.routed:Frontend") == ("Worker", "Router", "Frontend")
        assert names(f"{HERE}.unlinked:Frontend") == ("Prefill", "Worker", "Router", "Frontend")
    assert load_graph(f"{HERE}.routed:Frontend").edges["Frontend"] == ("Router",)


def test_linking_what_is_no_dependency_names_what_is() -> None:
    @service()
    class Other(Service):
        pass

    with pytest.raises(GraphError, match="Other cannot be linked to Worker; Other depends on no other service"):
        Other.link(import_service(f"{HERE}.services:Worker"))
    frontend = import_service(f"{HERE}.services:Frontend")
    with pytest.raises(GraphError, match="Frontend cannot be linked to Other; Frontend depends on Router, Worker"):
        frontend.link(Other)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing", "'nothing' names no service; write MODULE:Service"),
        ("a:", "'a:' names no service"),
        (
            f"{HERE}.agh:Frontend",
            f"there is no module {HERE}.agh; modules in package {HERE}: agg, .*did you mean agg",
        ),
        (f"{HERE}.services:Fronted", "has no Fronted; services there: Frontend, .*; did you mean Frontend?"),
        (f"{HERE}.plain:Frontend", r"plain:Frontend is not decorated with @service; services there: none"),
        (f"{HERE}.broken:Frontend", "broken cannot be imported: RuntimeError: two lines"),
        (f"{HERE}.needy:Frontend", "needy needs not_installed_anywhere, which is not installed"),
        ("no_such_package_at_all.x:Frontend", "there is no module no_such_package_at_all; modules in"),
        ("graphs.agg:Frontend", r"there is no module graphs; did you mean examples\.llm\.graphs\.agg\?"),
        ("agg:Frontend", r"there is no module agg; did you mean examples\.llm\.graphs\.agg\?"),
    ],
)
def test_a_target_that_cannot_be_loaded_says_what_is_there(target: str, message: str) -> None:
    with pytest.raises(GraphError, match=message) as caught:
        load_graph(target)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_working_directory_is_importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "graph_of_the_cwd.py").write_text(
        "from dynamo_local.sdk import service\n\n@service()\nclass Root: ...\n"
    )
    monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if entry])
    monkeypatch.chdir(tmp_path)
    root = load_graph("graph_of_the_cwd:Root").root
    assert target_of(root) == "graph_of_the_cwd:Root"


def test_a_service_that_another_process_cannot_import_is_refused() -> None:
    @service()
    class Local:
        pass

    with pytest.raises(GraphError, match="Local cannot be imported by name"):
        target_of(Local)


def test_two_services_of_one_name_are_refused() -> None:
    def make() -> type:
        @service()
        class Same:
            pass

        return Same

    @service()
    class Root:
        one = depends(make())
        two = depends(make())

    with pytest.raises(GraphError, match="two services of the graph are called Same"):
        build_graph("m:Root", Root, ())


def test_a_cycle_is_shown() -> None:
    with pytest.raises(GraphError, match=re.escape("in a circle: B -> C -> B")):
        dependency_order("A", {"A": ("B",), "B": ("C",), "C": ("B",)})


@st.composite
def acyclic(draw: st.DrawFn) -> dict[str, tuple[str, ...]]:
    """Edges from lower to higher numbers only."""
    count = draw(st.integers(1, 8))
    return {
        str(n): tuple(map(str, draw(st.lists(st.integers(n + 1, count - 1), unique=True)) if n + 1 < count else []))
        for n in range(count)
    }


@given(acyclic())
def test_whatever_is_reached_comes_once_and_after_its_dependencies(edges: dict[str, tuple[str, ...]]) -> None:
    order = dependency_order("0", edges)
    place = {name: index for index, name in enumerate(order)}
    assert len(place) == len(order)
    assert order[-1] == "0"
    for name in order:
        assert all(place[other] < place[name] for other in edges[name])
    reached = {"0"} | {other for name in order for other in edges[name]}
    assert set(order) == reached


@given(st.permutations(["A", "B", "C", "D"]))
def test_every_ring_is_a_cycle(ring: list[str]) -> None:
    edges = {one: (other,) for one, other in pairwise([*ring, ring[0]])}
    with pytest.raises(GraphError, match="circle"):
        dependency_order(ring[0], edges)
