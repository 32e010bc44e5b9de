"""Foreign code is replaced in engine/vllm/patches alone, and the table tells of all of it."""

from __future__ import annotations

import ast
import logging
import re
import sys
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.vllm.patches import table
from dynamo_local.engine.vllm.patches.forks import name_segments
from dynamo_local.engine.vllm.patches.table import PATCHES, Patch, applies, require
from state.remains import SEGMENTS_ENV

ROOT = Path(__file__).parents[4]
PACKAGE = ROOT / "dynamo_local/engine"
PATCHING = PACKAGE / "vllm/patches"
OURS = ("dynamo_local", "components", "state")

DOCUMENTED = {"tempfile.tempdir = None"}
"""Variables of Python's own modules that are documented to be set."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def replacements(source: str) -> Iterator[str]:
    """Statements that assign to an attribute of something imported from elsewhere, or put a function into another
    object than `self`: methods of single objects are replaced that way, too."""
    tree = ast.parse(source)
    foreign, functions, methods = _imported(tree), _functions(tree), _methods(tree)
    for node in ast.walk(tree):
        for target, value in _assignments(node):
            root = _root(target)
            if root in foreign or (_is_function(value, functions, methods) and not _is_own(target)):
                yield ast.unparse(node)


def _imported(tree: ast.AST) -> set[str]:
    """Names of what is imported from other projects, and names that are given to it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                (each.asname or each.name).partition(".")[0] for each in node.names if not each.name.startswith(OURS)
            }
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(OURS):
            found |= {each.asname or each.name for each in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Name | ast.Attribute):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id for name in targets if isinstance(name, ast.Name) and _root(node.value) in found}
    return found


def _functions(tree: ast.AST) -> set[str]:
    """Names of functions and classes, methods left out: a variable of a method's name is no function."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    methods = {node for of in classes for node in of.body}
    return {node.name for node in ast.walk(tree) if isinstance(node, Function | ast.ClassDef) and node not in methods}


def _methods(tree: ast.AST) -> set[str]:
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {node.name for of in classes for node in of.body if isinstance(node, Function)}


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Attributes and what they are set to. Of `setattr`, the object stands for the attribute."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            yield from ((each, value) for each, value in pairs if isinstance(each, ast.Attribute))
    elif isinstance(node, ast.AugAssign | ast.AnnAssign) and isinstance(node.target, ast.Attribute) and node.value:
        yield node.target, node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
        yield ast.Attribute(node.args[0], "any"), node.args[2]


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _is_own(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"


def _is_function(value: ast.expr, functions: set[str], methods: set[str]) -> bool:
    if isinstance(value, ast.Call):
        return _root(value.func) in {"partial", "staticmethod", "classmethod", "wraps"}
    if isinstance(value, ast.Attribute):
        return _is_own(value) and value.attr in methods
    return isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in functions)


MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if not path.is_relative_to(PATCHING)]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_foreign_is_replaced_elsewhere(path: Path) -> None:
    assert set(replacements(path.read_text())) <= DOCUMENTED


@pytest.mark.parametrize(
    "replacing",
    [
        "import gc\ngc.unfreeze = print",
        "import torch.distributed\ntorch.distributed.new_group = make(1)",
        "def f():\n    from vllm.v1.engine.core import EngineCore\n    EngineCore.step = step",
        "from vllm.a import A\nmanager: Any = A\nmanager.run = wrapped(manager.run)",
        "from vllm.a import A\nsetattr(A, name, function)",
        "def f(pool):\n    def touch(): ...\n    def free(): ...\n    pool.touch, pool.free_blocks = touch, free",
        "def f(processor):\n    processor.process = lambda: None",
        "def f(server):\n    server.main_loop = partial(loop, server)",
        "class A:\n    def known(self): ...\n    def f(self):\n        self._llm.processor._validate = self.known",
    ],
)
def test_what_replaces_foreign_code_is_found(replacing: str) -> None:
    assert list(replacements(dedent(replacing)))


@pytest.mark.parametrize(
    "harmless",
    [
        "from dynamo_local.core import names\nnames.value = 1",
        "class A:\n    def f(self):\n        self.now = time.monotonic",
        "def f(request):\n    request.trace_headers = {}",
        "import ctypes\nlibrary = ctypes.CDLL(None)\nlibrary.prctl.argtypes = (ctypes.c_int,)",
    ],
)
def test_what_replaces_none_is_not(harmless: str) -> None:
    assert not list(replacements(harmless))


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_each_row_names_its_contract_test(patch: Patch) -> None:
    assert patch.replaces or patch.is_deep
    assert not patch.is_deep or (patch.without is not None and patch.of == "vLLM")
    path, _, name = patch.test.partition("::")
    tests = ast.walk(ast.parse((ROOT / path).read_text()))
    assert name in {node.name for node in tests if isinstance(node, Function)}


STATE = {"any", "generator", "monitor_interval", "output_token_ids", "reasoner", "reasoning_ended", "waiting"}
"""Variables that patches set, beside functions and classes. Any: that of a `setattr`."""


def replaced_here(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    found = set(replacements(path.read_text()))
    return {
        target.attr
        for node in ast.walk(tree)
        for target, _ in _assignments(node)
        if isinstance(target, ast.Attribute) and ast.unparse(node) in found
    }


@pytest.mark.parametrize("path", sorted(PATCHING.rglob("*.py")), ids=lambda path: str(path.relative_to(PATCHING)))
def test_each_replacement_has_a_row(path: Path) -> None:
    rows = {name for patch in PATCHES.values() for part in patch.replaces for name in re.findall(r"\w+", part)}
    assert replaced_here(path) - rows <= STATE


class Cache:
    """Somebody's."""

    blocks = 3

    def find(self, name: str, *, deep: bool = False) -> int:
        return self.blocks


def declared(monkeypatch: pytest.MonkeyPatch, part: str, without: str | None = "it goes on") -> None:
    module: Any = ModuleType("somebodys")
    module.Cache = Cache
    monkeypatch.setitem(sys.modules, "somebodys", module)
    patch = Patch(why="", test="", replaces=(part,), without=without, of="Somebody")
    monkeypatch.setattr(table, "PATCHES", {"finding": patch})


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ("somebodys:Cache", None),
        ("somebodys:Cache.find", None),
        ("somebodys:Cache.find(self, name, deep)", None),
        ("somebodys:Cache.find(self, name, ...)", None),
        ("somebodys:Cache.find(...)", None),
        ("somebodys:Cache.blocks", None),
        ("nobodys:Cache", "nobodys cannot be imported (No module named 'nobodys')"),
        ("somebodys:Store", "somebodys has no Store"),
        ("somebodys:Cache.lost", "somebodys has no Cache.lost"),
        ("somebodys:Cache.find(self, name)", "somebodys.Cache.find takes (self, name, deep), not (self, name)"),
        ("somebodys:Cache.find()", "somebodys.Cache.find takes (self, name, deep), not ()"),
        ("somebodys:Cache.find(self, depth, ...)", "somebodys.Cache.find has no parameter depth"),
        ("somebodys:Cache.blocks(self)", "somebodys.Cache.blocks is no function whose parameters are known"),
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
