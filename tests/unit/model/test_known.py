"""Sources of vLLM and Transformers are read by threads of a server, for several endpoints at a time."""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError

import pytest

from dynamo_local.model.known import parsed


def test_no_two_threads_make_syntax_trees_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[int] = []
    both, parse = Barrier(2), ast.parse

    def watched(source: bytes) -> ast.Module:
        try:
            both.wait(0.2)
        except BrokenBarrierError:
            both.reset()
        else:
            met.append(1)
        return parse(source)

    with monkeypatch.context() as patched, ThreadPoolExecutor(2) as pool:
        patched.setattr(ast, "parse", watched)
        trees = list(pool.map(parsed, [b"a = 1\nb = 2"] * 2))
    assert [len(tree) for tree in trees] == [2, 2]
    assert met == []
