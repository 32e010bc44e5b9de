from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from multiprocessing import shared_memory
from types import ModuleType
from typing import Any

import pytest

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.vllm.patches import check
from dynamo_local.engine.vllm.patches.check import applies, require
from dynamo_local.engine.vllm.patches.forks import name_segments
from dynamo_local.engine.vllm.patches.table import Patch
from state.remains import SEGMENTS_ENV


@dataclass
class Cache:
    """Somebody's."""

    blocks: int

    def find(self, name: str, *, deep: bool = False) -> int:
        return self.blocks


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("somebodys")
    module.Cache = Cache
    module.__file__ = __file__
    monkeypatch.setitem(sys.modules, "somebodys", module)


def declared(monkeypatch: pytest.MonkeyPatch, part: str, without: str | None = "it goes on") -> None:
    patch = Patch(file="finding.py", why="", test="", replaces=(part,), without=without, of="Somebody")
    monkeypatch.setattr(check, "PATCHES", {"finding": patch})


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ("somebodys:Cache", None),
        ("somebodys:Cache.find", None),
        ("somebodys:Cache.find(self, name, deep)", None),
        ("somebodys:Cache.find(self, name, ...)", None),
        ("somebodys:Cache.find(...)", None),
        # A field without a default, which the class itself does not have.
        ("somebodys:Cache.blocks", None),
        ("somebodys~return self.blocks", None),
        ("nobodys:Cache", "nobodys cannot be imported (No module named 'nobodys')"),
        ("somebodys:Store", "somebodys has no Store"),
        ("somebodys:Cache.lost", "somebodys has no Cache.lost"),
        ("somebodys:Cache.find(self, name)", "somebodys.Cache.find takes (self, name, deep), not (self, name)"),
        ("somebodys:Cache.find()", "somebodys.Cache.find takes (self, name, deep), not ()"),
        ("somebodys:Cache.find(self, depth, ...)", "somebodys.Cache.find has no parameter depth"),
        ("somebodys:Cache.blocks(self)", "somebodys.Cache.blocks is no function whose parameters are known"),
        ("somebodys~self." + "cells", "somebodys knows no self." + "cells"),
    ],
)
def test_what_differs_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str, why: str | None
) -> None:
    declared(monkeypatch, part)
    with caplog.at_level(logging.WARNING):
        assert applies("finding") is (why is None)
    told = [record.getMessage() for record in caplog.records]
    assert told == ([] if why is None else [f"Somebody is not as expected, for finding: {why}; it goes on"])


def test_what_nothing_works_without_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    declared(monkeypatch, "somebodys:Cache.find(self)", without=None)
    with pytest.raises(EngineError, match=r"for finding: somebodys.Cache.find takes .*install vLLM"):
        require("finding")


def test_shared_memory_keeps_its_names_where_python_makes_them_in_another_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: Any = shared_memory
    monkeypatch.setattr(made, "_make_filename", lambda prefix: prefix)
    before = made._make_filename
    name_segments({SEGMENTS_ENV: "ours"})
    assert made._make_filename is before
    assert caplog.text.count("Python is not as expected, for naming shared memory") == 1
