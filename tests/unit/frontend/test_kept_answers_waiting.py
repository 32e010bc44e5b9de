"""Answers that wait to be tried again, or to be taken over."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from components.frontend.answers.answers import Answers
from components.frontend.settings import AnswerLimits
from dynamo_local.core.answers.records import AnswerHead, begun
from dynamo_local.tasks import TaskGuard
from state.answers.folder import AnswerFolder
from state.answers.journal import AnswerJournal
from state.paths import StatePaths
from tests.unit.frontend.kept_scene import Application, Start, until, whole


class SlowFolder(AnswerFolder):
    """Has taken an answer for a while before it says so."""

    def __init__(self, paths: StatePaths) -> None:
        super().__init__(paths)
        self.has_taken, self.goes = threading.Event(), threading.Event()

    def take(self, owner: str, answer: str) -> AnswerJournal | None:
        taken = super().take(owner, answer)
        self.has_taken.set()
        self.goes.wait()
        return taken


async def test_answers_that_are_refused_are_counted_while_they_wait(start: Start) -> None:
    frontend = await start(Application())
    frontend.unready = "no worker"
    answer = await frontend.begin()
    await until(lambda: frontend.answers.waiting() == {"m": 1})
    frontend.unready = None
    assert whole(await frontend.follow(answer))
    assert frontend.answers.waiting() == {}


async def test_whoever_is_cancelled_while_it_takes_an_answer_over_lets_go_of_it(tmp_path: Path) -> None:
    folder = SlowFolder(StatePaths(tmp_path, "n"))
    head = AnswerHead(answer="resp_1", created_at=1, fields={"model": "m"})
    folder.create("o", head.answer, begun(head)).close()
    answers = Answers(folder, AnswerLimits(), TaskGuard())
    looking = asyncio.create_task(answers._look())
    await until(folder.has_taken.is_set)
    looking.cancel()
    folder.goes.set()
    await asyncio.wait({looking})
    assert looking.cancelled()
    again = folder.take("o", head.answer)
    assert again is not None
    again.close()
