"""Which tests run every day, and which in turn: the one table of both.

Every test runs every day unless NIGHTLY names it. What is named there runs by slices of a few minutes, one with each
commit, and at once where a change touches what it is about.

    python -m scripts.lanes                 the slices
    python -m scripts.lanes --from RECORD   take the seconds of nightly tests from a record of scripts.run_tests
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from scripts.timings import Line, file_of, read

ROOT = Path(__file__).resolve().parent.parent
SECONDS = Path(__file__).with_name("nightly_seconds.json")
"""Item -> seconds that it took, tests one after the other."""
SLICE_S = 180.0
UNKNOWN_S = 60.0
"""Assumed of an item that has not been recorded."""
SIDE_BY_SIDE = {"unit": 2.0, "integration": 3.0}
"""Suite -> tests that run at a time, on two cores."""

LANES: Mapping[str, tuple[str, ...]] = {
    "vllm": ("components/vllm", "dynamo_local/engine/vllm", "requirements"),
    "cluster": (
        "dynamo_local/ray",
        "dynamo_local/supervisor/server/nats",
        "dynamo_local/supervisor/places",
    ),
    "models": ("dynamo_local/core/sizing", "dynamo_local/model"),
    "planner": ("components/planner.py", "dynamo_local/core/planning", "dynamo_local/planner"),
    "benchmarks": ("benchmarks",),
    "clients": ("docs/guides/clients.md", "tests/clients"),
    "conformance": ("tests/conformance",),
    "long": (),
}
"""Lane -> paths that touch it: what is changed there has all of the lane run, and what fails blocks."""

_KILLED_ANSWERS = "test_whatever_is_killed_the_answer_is_the_same_and_so_is_each_event"

NIGHTLY: Mapping[str, str] = {
    "tests/e2e/test_conformance.py": "vllm",
    "tests/e2e/environments/test_ray.py": "cluster",
    "tests/e2e/kv/test_between_machines.py": "cluster",
    "tests/e2e/environments/test_local.py": "long",
    "tests/e2e/faults/test_background_answers.py": "long",
    "tests/e2e/faults/test_neighbour.py::test_an_engine_leaves_the_core_of_a_busy_neighbour_and_comes_back": "long",
    "tests/e2e/kv/test_prefix_pull.py::test_preemption_at_both_sides": "vllm",
    "tests/e2e/kv/test_prefix_pull.py::test_an_urgent_request_takes_a_slot[two steps ahead]": "vllm",
    "tests/e2e/models/test_fidelity.py::test_each_row": "models",
    "tests/e2e/models/test_pooling.py": "models",
    "tests/e2e/models/test_real_model.py": "models",
    "tests/e2e/models/test_tensor_parallel.py": "models",
    "tests/e2e/scaling/test_planner.py": "planner",
    "tests/e2e/scaling/test_scale.py": "long",
    "tests/e2e/test_batches.py": "long",
    "tests/integration/ray": "cluster",
    "tests/integration/supervisor/test_far_worker.py": "cluster",
    "tests/integration/supervisor/test_nats_cluster.py": "cluster",
    "tests/integration/endpoints/test_turns.py::"
    "test_a_queue_of_mixed_requests_takes_few_starts_and_a_running_request_is_never_cut": "long",
    "tests/integration/endpoints/test_zero.py::"
    "test_a_start_that_fails_is_told_and_repeated_only_for_a_request_after_a_pause": "long",
    f"tests/integration/frontend/test_background_answers.py::{_KILLED_ANSWERS}[Nats]": "long",
    f"tests/integration/frontend/test_background_answers.py::{_KILLED_ANSWERS}[serve]": "long",
    "tests/integration/monitoring/test_chaos_short.py::test_with_prefill_workers_as_well": "long",
    "tests/integration/monitoring/test_planner.py::"
    "test_a_disaggregated_graph_adds_and_removes_workers_of_both_roles": "planner",
    "tests/integration/monitoring/test_planner.py::"
    "test_a_planner_that_is_killed_is_started_again_and_goes_on": "planner",
    "tests/integration/stored/test_async_tasks_of_a_server.py": "long",
    "tests/integration/stored/test_batches_of_a_server.py::test_each_line_has_one_result_whatever_is_killed": "long",
    "tests/integration/supervisor/test_devices.py::test_a_device_never_has_two_holders": "long",
    "tests/integration/supervisor/test_dynamo_names.py": "long",
    "tests/integration/supervisor/test_rotation.py::test_nats_killed_during_a_rotation_costs_no_request[0.0]": "long",
    "tests/unit/benchmarks": "benchmarks",
    "tests/e2e -m families": "models",
    "tests/unit/core --hypothesis-profile=nightly": "long",
}
"""What does not run every day -> its lane. A folder, a file or a test, or arguments of pytest that choose some."""

COMMANDS: Mapping[str, tuple[str, str]] = {
    "conformance agg_router": ("conformance", "tests.conformance --server agg_router"),
    "conformance disagg": ("conformance", "tests.conformance --server disagg"),
    "clients": ("clients", "tests.clients"),
    "chaos on mockers": ("long", "tests.chaos --seconds 120"),
    "chaos on vLLM": ("long", "tests.chaos --seconds 120 --engine vllm"),
    "faults of the server": ("long", "tests.chaos.server_faults --faults 45"),
}
"""What is no test of pytest: name -> its lane, and the module with its arguments. Chaos judges times as well: it has no
lane that blocks."""


@dataclass(frozen=True)
class Item:
    """What runs as a whole. `arguments`: of pytest, or a module and its arguments where `suite` is None."""

    name: str
    lane: str
    suite: str | None
    arguments: tuple[str, ...]
    seconds: float

    @property
    def alone(self) -> bool:
        """Whether it is a run of its own. Others of a suite share one, and so their servers."""
        return self.suite is None or len(self.arguments) > 1

    def touched_by(self, changed: Collection[str] | None) -> bool:
        """Whether a change concerns it: a path of its lane, or its own file. None: the change is unknown, and concerns
        all tests whose lane has paths, but no commands."""
        if changed is None:
            return self.suite is not None and len(LANES[self.lane]) > 0
        own = file_of(self.arguments[0])
        return any(below(path, LANES[self.lane]) or (path == own and own.endswith(".py")) for path in changed)


def below(path: str, places: Iterable[str]) -> bool:
    return any(PurePosixPath(path).is_relative_to(place) for place in places)


def suite_of(target: str) -> str:
    """The suite that a target belongs to, as in tests/SUITE/..."""
    return target.partition(" ")[0].split("/")[1]


def arguments_of(target: str) -> tuple[str, ...]:
    """A target of NIGHTLY as arguments of pytest. A test is one, whatever its parameters are called."""
    return (target,) if "::" in target else tuple(target.split(" "))


def everyday(suite: str) -> list[str]:
    """Arguments of pytest that leave out what does not run every day."""
    targets = [target for target in NIGHTLY if suite_of(target) == suite and len(arguments_of(target)) == 1]
    return [f"--{'deselect' if '::' in target else 'ignore'}={target}" for target in targets]


def runs_every_day(test: str) -> bool:
    """Whether a test, by its node id, runs every day. Families are chosen by their marker: unknown here."""
    return not any(test == target or test.startswith((f"{target}/", f"{target}::", f"{target}[")) for target in NIGHTLY)


def read_seconds() -> dict[str, float]:
    return msgspec.json.decode(SECONDS.read_bytes(), type=dict[str, float])


def items(root: Path, seconds: Mapping[str, float]) -> list[Item]:
    """All that runs in turn, in the order of the tables, a folder by its files."""
    found = []
    for target, lane in NIGHTLY.items():
        names = [target]
        if (root / target).is_dir():
            names = sorted(file.relative_to(root).as_posix() for file in (root / target).rglob("test_*.py"))
        for name in names:
            suite = suite_of(name)
            took = seconds.get(name, UNKNOWN_S) / SIDE_BY_SIDE.get(suite, 1.0)
            found += parts(Item(name, lane, suite, arguments_of(name), took))
    for name, (lane, command) in COMMANDS.items():
        found.append(Item(name, lane, None, tuple(command.split(" ")), seconds.get(name, UNKNOWN_S)))
    return found


def parts(item: Item) -> list[Item]:
    """An item as it is, or if it takes more than a slice, by as many parts of its tests as fit."""
    count = math.ceil(item.seconds / SLICE_S - 0.25)
    if count < 2 or "::" in item.name:
        return [item]
    return [
        Item(
            f"{item.name} ({number} of {count})",
            item.lane,
            item.suite,
            (*item.arguments, f"--part={number}/{count}"),
            item.seconds / count,
        )
        for number in range(1, count + 1)
    ]


def slices(items: Iterable[Item]) -> list[list[Item]]:
    """Items in their order, by groups that take SLICE_S at most; one that takes longer is alone."""
    found: list[list[Item]] = []
    for item in items:
        if not found or sum(each.seconds for each in found[-1]) + item.seconds > SLICE_S:
            found.append([])
        found[-1].append(item)
    return found


def runs(items: Iterable[Item]) -> list[tuple[str, list[Item]]]:
    """Suite or command -> the items of one process of it."""
    together: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        together[item.name if item.alone else str(item.suite)].append(item)
    return list(together.items())


@dataclass(frozen=True)
class Turn:
    """What a run of CI has beside the everyday tests. What fails of `touched` blocks, of `extra` it does not."""

    number: int
    of: int
    touched: tuple[Item, ...]
    extra: tuple[Item, ...]
    left_out: tuple[Item, ...]

    def lines(self) -> list[str]:
        """What runs and what does not, to be said."""
        lanes = sorted({item.lane for item in self.touched})
        return [
            f"beside the everyday tests: {named(self.touched) or 'nothing'}, touched by the change"
            + (f" ({', '.join(lanes)})" if lanes else ""),
            f"slice {self.number + 1} of {self.of}: {named(self.extra) or 'nothing else'}; it does not block",
            f"not run: {named(self.left_out) or 'nothing'}",
        ]


def turn(all_items: Sequence[Item], number: int, changed: Collection[str] | None) -> Turn:
    """The slice whose number it is, counted round, and what a change touches."""
    groups = slices(all_items)
    mine = groups[number % len(groups)]
    touched = tuple(item for item in all_items if item.touched_by(changed))
    extra = tuple(item for item in mine if item not in touched)
    left_out = tuple(item for item in all_items if item not in touched and item not in extra)
    return Turn(number % len(groups), len(groups), touched, extra, left_out)


def named(items: Iterable[Item]) -> str:
    """Names of items, those of one folder by how many they are."""
    folders: dict[str, list[str]] = defaultdict(list)
    for item in items:
        folders["/".join(item.name.split("/")[:3]) if item.suite is not None else item.name].append(item.name)
    return ", ".join(names[0] if len(names) == 1 else f"{len(names)} of {at}" for at, names in folders.items())


def recorded(lines: Iterable[Line], old: Mapping[str, float], names: Collection[str]) -> dict[str, float]:
    """Seconds of items, by a record where it has them. Of a file, those of its tests; of others, of their runs."""
    found: dict[str, float] = defaultdict(float)
    for line in lines:
        if line.kind == "test":
            for name in {file_of(line.name), line.name.partition("[")[0], line.name}:
                found[name] += line.wall
        elif line.kind == "suite":
            found[line.name.partition(" (")[0]] += line.seconds
    both = {**old, **found}
    return {name: round(both[name], 1) for name in sorted(names) if name in both}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="record", type=Path, metavar="RECORD", help="record of a run with nightly tests")
    options = parser.parse_args(arguments)
    if options.record is not None:
        names = {item.name.partition(" (")[0] for item in items(ROOT, {})}
        table = recorded(read(options.record), read_seconds(), names)
        SECONDS.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
    for number, group in enumerate(slices(items(ROOT, read_seconds()))):
        print(f"{number + 1}: {sum(item.seconds for item in group):.0f} s: {named(group)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
