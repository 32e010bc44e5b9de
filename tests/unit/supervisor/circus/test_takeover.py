"""Takeover by a new circusd: which watchers it is told of, and which process belongs to which."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.process.restarts import CircusDeadlines
from dynamo_local.supervisor.circus.adopted import adoption, parse_adoption
from dynamo_local.supervisor.circus.client import CircusSilence
from dynamo_local.supervisor.circus.daemon import plan_takeover
from dynamo_local.supervisor.upkeep.orphans import Orphan, processes_of_watchers
from state.machine.processes import Kin, Process
from state.statefile.model import Owner, Phase, State
from state.statefile.transitions import claim, new_state, release
from tests.unit.supervisor.recording import RecordingReport

NAMES = ("ns_A", "ns_A_1", "ns_B")
PHASES: tuple[Phase | None, ...] = (None, "starting", "retiring", "restarting")


def process(pid: int, watcher: str = "ns_A", started: int = 1) -> Process:
    return Process(pid, started, {"DYN_WATCHER": watcher})


def orphan(
    pid: int, *, group: int | None = None, session: int = 1, started: int = 1, stands_in: bool = False
) -> Orphan:
    return Orphan(process(pid, started=started), Kin(99, pid if group is None else group, session), stands_in)


def state_of(phases: dict[str, Phase | None]) -> State:
    state = new_state("ns", "ipc:///c", "cpu-slot", Owner(1, 1))
    for name in sorted({*phases, *(("ns_A",) if "ns_A_1" in phases else ())}):
        state = claim(state, name, role="worker", cmd="x")
    for name in set(state.components) - phases.keys():
        state = release(state, name)
    components = {
        name: msgspec.structs.replace(c, phase=phases.get(name)) if c.holds else c
        for name, c in state.components.items()
    }
    return msgspec.structs.replace(state, components=components)


@given(
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(PHASES)),
    st.sets(st.sampled_from((*NAMES, "ns_Stranger"))),
)
def test_every_process_is_adopted_or_ended_and_no_watcher_has_two(
    phases: dict[str, Phase | None], run: set[str]
) -> None:
    running = {name: process(number, name) for number, name in enumerate(sorted(run), 10)}
    found = plan_takeover(state_of(phases), running)
    adopted = [process.pid for process in found.adopted.values()]
    assert sorted([*adopted, *(stray.pid for stray in found.strays)]) == [each.pid for each in running.values()]
    assert found.adopted.keys() == phases.keys() & run
    assert not found.adopted.keys() & set(found.idle)
    assert set(found.idle) == {name for name, phase in phases.items() if phase is None} - run


def test_watchers_of_other_nodes_are_not_started_here() -> None:
    state = claim(state_of({"ns_A": None}), "ns_B", role="worker", cmd="x", node="far")
    assert plan_takeover(state, {}).idle == ("ns_A",)
    # A process of that name is none of theirs.
    assert plan_takeover(state, {"ns_B": process(10, "ns_B")}).strays == (process(10, "ns_B"),)


def test_the_process_of_a_watcher_leads_a_group_and_no_session() -> None:
    launcher, fork = orphan(20, started=5), orphan(10, started=6)
    tracker, engine = orphan(30, group=10, started=1), orphan(40, session=40, started=1)
    stand_in = orphan(50, started=1, stands_in=True)
    assert processes_of_watchers([fork, tracker, engine, stand_in, launcher]) == {"ns_A": launcher.process}
    assert processes_of_watchers([tracker, engine, stand_in]) == {}


@given(st.integers(1, 2**22), st.integers(1), st.lists(st.text(), min_size=1), st.lists(st.text()))
def test_an_adoption_is_read_back_whatever_precedes_it(
    pid: int, started: int, argv: list[str], before: list[str]
) -> None:
    assert parse_adoption([*before, *adoption(pid, started, tuple(argv))]) == (pid, started, argv)


@given(st.lists(st.text()))
def test_other_commands_are_no_adoptions(argv: list[str]) -> None:
    assert parse_adoption(argv) is None
    assert parse_adoption([*argv, "dynamo_local.supervisor.circus.adopted"]) is None


def heard(silence: CircusSilence, *silent_s: float) -> None:
    for one in silent_s:
        silence.lasts(one)


def test_silence_is_told_of_at_growing_intervals_and_ended_once() -> None:
    report, killed = RecordingReport(), []
    silence = CircusSilence(report, CircusDeadlines(10, 120), lambda: killed.append(True))
    heard(silence, *(step / 2 for step in range(300)))
    told = [f"circusd has not answered for {after} s; retrying" for after in (10, 20, 40, 80)]
    assert report.lines == [*told, "circusd has not answered for 120 s; it is killed"]
    assert killed == [True]
    silence.ends()
    heard(silence, 9.5, 120)
    assert killed == [True, True]


def test_silence_for_a_moment_is_nobodys_business() -> None:
    report = RecordingReport()
    silence = CircusSilence(report, CircusDeadlines(10, 120))
    heard(silence, 9.9)
    silence.ends()
    assert report.lines == []
    heard(silence, 10, 500, 700)
    silence.ends()
    assert report.lines == [
        "circusd has not answered for 10 s; retrying",
        "circusd has not answered for 500 s; retrying",
        "circusd answers again",
    ]
