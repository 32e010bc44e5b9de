"""Options, parsers and environment variables that `dynamo serve` knows are those of the installed vLLM."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.entrypoints.generate.base.protocol import validate_cache_salt
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.envs import environment_variables
from vllm.exceptions import VLLMValidationError
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import MAX_LOGPROB_TOKEN_IDS
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.structured_output.utils import compile_regex_with_timeout

from dynamo_local.core.errors import UsageError
from dynamo_local.core.http.bounds.request import SALT_CHARACTERS
from dynamo_local.core.sizing.parsers import REASONING_RULES, TOOL_RULES
from dynamo_local.engine.vllm.arguments import REFUSED_VARIABLES
from dynamo_local.engine.vllm.command_line import REFUSED, parse
from dynamo_local.engine.vllm.environment import IMPORT_DEFAULTS
from scripts.reference.vllm_variables import HARMLESS, OURS, TAKEN


def test_each_option_of_vllm_serve_is_taken_or_refused_with_an_alternative() -> None:
    """Walks vLLM's own parser, so that an option which another version adds is noticed here."""
    unknown = []
    refused = set()
    for action in make_arg_parser(FlexibleArgumentParser())._actions:
        for option in action.option_strings:
            if option in ("-h", "--help", "--config"):
                continue  # `dynamo serve --help`; a file is read at once
            try:
                assert parse([option] if action.nargs == 0 else [option, "1"]).flags
            except UsageError as error:
                (refused.add(option) if error.remedy in REFUSED.values() else unknown.append(option))
    assert not unknown
    # So that the test cannot pass because all is refused, or nothing.
    assert {"--host", "--port", "--data-parallel-size", "--headless"} <= refused
    assert not {"--max-model-len", "--tensor-parallel-size", "-tp", "--no-enable-prefix-caching"} & refused


def test_what_is_refused_exists() -> None:
    options = {
        option for action in make_arg_parser(FlexibleArgumentParser())._actions for option in action.option_strings
    }
    assert {f"--{name}" for name in REFUSED} <= options


def test_parsers_that_are_chosen_exist() -> None:
    assert {rule.parser for rule in TOOL_RULES} <= set(ToolParserManager.list_registered())
    assert {rule.parser for rule in REASONING_RULES} <= set(ReasoningParserManager.list_registered())


def test_each_variable_of_vllm_has_one_verdict() -> None:
    """A variable that another version adds is noticed here, and so is one that it drops."""
    grouped = (*TAKEN.values(), *HARMLESS.values())
    named = [*REFUSED_VARIABLES, *OURS, *(name for names in grouped for name in names.split())]
    known = set(environment_variables)
    assert known - set(named) == set()
    assert {name for name in named if name.startswith("VLLM_")} - known == set()
    assert [name for name, times in Counter(named).items() if times > 1] == []


def test_each_variable_that_puts_code_before_the_server_is_refused() -> None:
    # In another process: this library sets the level of all loggers when it is imported.
    library = "model_hosting_container_standards"
    script = f"""
from {library}.common.fastapi.config import FASTAPI_ENV_CONFIG
from {library}.sagemaker.config import SAGEMAKER_ENV_CONFIG
print(*FASTAPI_ENV_CONFIG, *SAGEMAKER_ENV_CONFIG)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    names = set(done.stdout.split())
    assert names
    assert names <= set(REFUSED_VARIABLES)


def test_vllms_smaller_bounds_are_those_that_the_documentation_names(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs/reference/http-api.md").read_text()
    for name in ("VLLM_MAX_STOP_STRINGS", "VLLM_MAX_NUM_BAD_WORDS", "VLLM_MAX_COMPLETION_PROMPTS"):
        monkeypatch.delenv(name, raising=False)
        assert f"| `{name}` | {environment_variables[name]()} |" in page
    assert f"at most {MAX_LOGPROB_TOKEN_IDS}, however high" in page
    validate_cache_salt("x" * SALT_CHARACTERS)
    for salt in ("x" * (SALT_CHARACTERS + 1), "a@b", "a/b", "a\\b", ""):
        with pytest.raises(VLLMValidationError):
            validate_cache_salt(salt)


def test_a_regular_expression_is_compiled_in_the_thread_whose_time_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own deadline, which is shorter than grammar-timeout-s, would have it compiled in another one."""
    name = "VLLM_REGEX_COMPILATION_TIMEOUT_S"
    monkeypatch.setenv(name, IMPORT_DEFAULTS[name])
    assert compile_regex_with_timeout(lambda _: threading.get_ident(), "a") == threading.get_ident()
