"""What is queued for a model is told with its requests."""

from __future__ import annotations

from components.frontend.http.models import ModelEntry, ModelTable
from components.frontend.queued import QueuedWork


def test_each_model_has_what_is_queued_under_its_names() -> None:
    told: list[str] = []
    entries = [ModelEntry(names, lambda: None) for names in (["chat", "chat-lora"], ["code"])]
    for entry in entries:
        entry.on_change = lambda entry=entry: told.append(entry.names[0])  # type: ignore[misc]
    waiting = {"chat": 3, "chat-lora": 2, "gone": 9}
    work = QueuedWork(ModelTable(entries), lambda: waiting)
    work.tell()
    work.tell()
    assert ([entry.queued for entry in entries], told) == ([5, 0], ["chat"])
    waiting.clear()
    work.tell()
    assert ([entry.queued for entry in entries], told) == ([0, 0], ["chat", "chat"])
