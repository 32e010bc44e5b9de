from __future__ import annotations

from dynamo_local.sim.events import Agenda


def test_actions_run_in_order_of_time_and_late_ones_after_all_others_of_their_time() -> None:
    agenda, done = Agenda(), list[str]()
    agenda.at(1.0, lambda: done.append("late"), late=True)
    agenda.at(2.0, lambda: done.append("last"))
    agenda.at(1.0, lambda: done.append("first"))

    def second() -> None:
        done.append("second")
        agenda.at(1.0, lambda: done.append("entered meanwhile"))

    agenda.at(1.0, second)
    agenda.run()
    assert done == ["first", "second", "entered meanwhile", "late", "last"]
    assert agenda.now == 2.0
