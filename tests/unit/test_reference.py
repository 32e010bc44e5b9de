"""The generated reference: complete, true, and the same on every machine."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import click
import pytest

from dynamo_local.cli.commands import INTERRUPTED
from dynamo_local.cli.main import EXIT_CODES, dynamo
from dynamo_local.core.errors import ConfigError, DynamoError
from dynamo_local.core.live_settings import SETTINGS
from dynamo_local.sdk.config.schema import build_settings, canonical, schema_of, settings_of
from dynamo_local.sdk.config.sections import SERVICE_ARGS, TAKEN
from dynamo_local.sdk.resources import Resources
from dynamo_local.sdk.service import ServiceSpec
from scripts.reference.__main__ import ROOT, main
from scripts.reference.command_line import arguments_of, context_of, options_of, walk
from scripts.reference.configuration import own_keys, specs
from scripts.reference.variables import sources, variables

COMMANDS = list(walk(context_of(dynamo, "dynamo")))
SERVICES = [spec for _, spec in specs()]
SENTENCE = re.compile(r"[A-Z`].*[^.\s]\.", re.DOTALL)
NOTES = re.compile(r"\s*\[(default|env): [^]]*\]")
ORDINARY = {"HOME", "HF_ENDPOINT", "NO_PROXY", "PYTHONUTF8", "RAY_ADDRESS", "no_proxy"}
"""Read as every program reads it, or as the library that it is for does."""


def is_described(help: str | None) -> bool:
    return SENTENCE.fullmatch(NOTES.sub("", help or "")) is not None


def tree(error: type[DynamoError]) -> Iterator[type[DynamoError]]:
    yield error
    for kind in error.__subclasses__():
        yield from tree(kind)


@pytest.mark.parametrize("context", COMMANDS, ids=lambda context: context.command_path)
def test_commands_options_and_arguments_are_described(context: click.Context) -> None:
    help = context.command.help or ""
    assert is_described(help.partition("\n\n")[0])
    assert [option.name for option in options_of(context) if not is_described(option.help)] == []
    # Click has no help of their own for arguments.
    names = [name for each in arguments_of(context) for name in re.split(r"[|\s]", each.human_readable_name)]
    assert [name for name in names if name.strip("[].") not in help] == []


@pytest.mark.parametrize("spec", SERVICES, ids=lambda spec: f"{spec.name}-{spec.role}")
def test_keys_of_services_are_described(spec: ServiceSpec) -> None:
    assert [name for name, key in own_keys(spec.schema).items() if not is_described(key.help)] == []


def test_keys_that_every_service_has_and_live_settings_are_described() -> None:
    keys = [TAKEN, *SERVICE_ARGS.keys().values(), *schema_of(Resources).keys().values()]
    helps = {key.name: key.help for key in keys} | {setting.name: setting.help for setting in SETTINGS.values()}
    assert [name for name, help in helps.items() if not is_described(help)] == []


def out_of_bounds() -> Iterator[tuple[type, str, float]]:
    """Settings, a key, and a value that the reference says is not allowed."""
    for kind in {kind for spec in SERVICES for kind in settings_of(spec.schema)}:
        for field in fields(kind):
            for bound, step in (("at_least", -1), ("above", 0), ("at_most", 1)):
                if (limit := field.metadata.get(bound)) is not None:
                    yield kind, canonical(field.name), limit + step


def test_a_value_out_of_the_told_bounds_is_refused() -> None:
    found = list(out_of_bounds())
    assert {"prefill-batch", "grammar-timeout-s", "max-gpu-budget", "mocker-speedup"} <= {key for _, key, _ in found}
    for kind, key, wrong in found:
        with pytest.raises(ConfigError, match=key):
            build_settings(kind, "Service", {key: wrong})


def test_exit_codes_are_those_of_the_errors() -> None:
    assert set(EXIT_CODES) == {0, INTERRUPTED} | {error.exit_code for error in tree(DynamoError)}


def test_variables_are_declared_once_with_a_description() -> None:
    found = variables(ROOT)
    assert {"DYN_LOCAL_STATE_DIR", "DYN_WATCHER", "OPENAI_API_KEY"} <= {variable.name for variable in found}
    assert [variable.name for variable in found if not is_described(variable.help)] == []
    assert [name for name, times in Counter(variable.name for variable in found).items() if times > 1] == []


def names_read(node: ast.AST) -> Iterator[str]:
    """Texts that stand where a variable's name does, or that can be nothing else."""
    match node:
        case (
            ast.Call(
                func=ast.Attribute(value=ast.Name(id="environ") | ast.Attribute(attr="environ"), attr="get" | "pop"),
                args=[name, *_],
            )
            | ast.Call(func=ast.Attribute(attr="getenv"), args=[name, *_])
            | ast.Subscript(value=ast.Name(id="environ") | ast.Attribute(attr="environ"), slice=name, ctx=ast.Load())
            | ast.keyword(arg="envvar", value=name)
            | ast.Compare(
                left=name,
                ops=[ast.In() | ast.NotIn()],
                comparators=[ast.Name("environ") | ast.Attribute(attr="environ")],
            )
        ) if isinstance(name, ast.Constant):
            yield str(name.value)
        case ast.Constant(value=str(text)) if re.fullmatch(r"_?DYN_[A-Z_]+", text):
            yield text


def test_no_variable_is_read_that_is_not_declared() -> None:
    """A variable is read by its constant. Its name stands in the source once, in the declaration."""
    read = Counter(
        name
        for path in sources(ROOT)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in names_read(node)
    )
    declared = Counter(variable.name for variable in variables(ROOT) if variable.name.startswith("DYN_"))
    assert read - declared - Counter({name: read[name] for name in ORDINARY}) == Counter()


def test_files_that_differ_are_named_with_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"], tmp_path) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "cli.md, configuration.md, control-api.md, environment.md" in error
    assert "make reference" in error
    assert main([], tmp_path) == main(["--check"], tmp_path) == 0
    (tmp_path / "cli.md").write_text("else")
    assert main(["--check"], tmp_path) == 1
    assert "configuration.md" not in capsys.readouterr().err


def test_the_files_are_up_to_date_on_every_machine_without_vllm(tmp_path: Path) -> None:
    script = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from scripts.reference.__main__ import main
assert main(["--check"]) == 0
print(sorted({"torch", "transformers", "vllm"} & set(sys.modules)))
"""
    elsewhere = {
        "HOME": str(tmp_path),
        "COLUMNS": "40",
        "LC_ALL": "C",
        "DYN_NAMESPACE": "another",
        "DYN_CPU_SLOTS": "7",
    }
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, **elsewhere, "PYTHONPATH": str(ROOT)},
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1] == "[]"
