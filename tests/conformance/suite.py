"""A copy of those of vLLM's API tests that apply, which asks a server that runs already. What they assert stays."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

HERE = Path(__file__).parent
MODEL_ENV = "CONFORMANCE_MODEL"
BASE_URL_ENV = "CONFORMANCE_BASE_URL"
RESULTS_ENV = "CONFORMANCE_RESULTS"
SELECTED_ENV = "CONFORMANCE_SELECTED"
"""File with the names of the tests to run, one a line; without it all run."""

FILES = (
    # First, as these tests count from zero.
    "entrypoints/serve/instrumentator/test_metrics.py",
    "entrypoints/anthropic/test_messages.py",
    "entrypoints/cohere/test_chat_v2.py",
    "entrypoints/generate/generative_scoring/test_generative_scoring_e2e.py",
    "entrypoints/generate/structured_decisions/test_structured_decisions_e2e.py",
    "entrypoints/openai/chat_completion/test_batched_chat_completions.py",
    "entrypoints/openai/chat_completion/test_chat.py",
    "entrypoints/openai/chat_completion/test_chat_completion.py",
    "entrypoints/openai/chat_completion/test_chat_completion_with_prompt_embeds.py",
    "entrypoints/openai/chat_completion/test_chat_echo.py",
    "entrypoints/openai/chat_completion/test_chat_logit_bias_validation.py",
    "entrypoints/openai/chat_completion/test_completion_with_function_calling.py",
    "entrypoints/openai/chat_completion/test_enable_force_include_usage.py",
    "entrypoints/openai/chat_completion/test_include_reasoning.py",
    "entrypoints/openai/chat_completion/test_logprob_token_ids.py",
    "entrypoints/openai/chat_completion/test_non_object_body_validation.py",
    "entrypoints/openai/chat_completion/test_thinking_token_budget.py",
    "entrypoints/openai/completion/test_completion.py",
    "entrypoints/openai/completion/test_completion_with_prompt_embeds.py",
    "entrypoints/openai/completion/test_prompt_validation.py",
    "entrypoints/openai/completion/test_token_in_token_out.py",
    "entrypoints/openai/models/test_models.py",
    "entrypoints/openai/responses/test_basic.py",
    "entrypoints/openai/responses/test_function_call.py",
    "entrypoints/openai/responses/test_parsable_context.py",
    "entrypoints/openai/responses/test_simple.py",
    "entrypoints/openai/responses/test_stateful.py",
    "entrypoints/openai/responses/test_structured_output.py",
    "entrypoints/openai/test_chunked_prompt.py",
    "entrypoints/openai/test_return_token_ids.py",
    "entrypoints/openai/test_return_tokens_as_ids.py",
    "entrypoints/scale_out/token_in_token_out/test_serving_tokens.py",
    "entrypoints/serve/instrumentator/test_basic.py",
    "entrypoints/serve/instrumentator/test_orca_metrics.py",
    "entrypoints/serve/middleware/test_optional_middleware.py",
    "entrypoints/serve/tokenize/test_tokenization.py",
)
"""Tests of text generation by one server, in vLLM's folder `tests`. Not among them: other modalities, pooling, what
changes a server while it runs, and tests that start servers themselves."""
IMPORTED = ("entrypoints/openai/utils.py", "entrypoints/openai/chat_completion/test_serving_chat.py")
"""Further files that these tests import."""
SHIMS = {"utils.py": "shim_utils.py", "conftest.py": "shim_conftest.py"}

_MODEL_CONSTANT = re.compile(r'^[A-Z_]*MODEL[A-Z_]*(?:: [^=]+)? = "([^"]+)"', re.M)
_MODELS_IN_FUNCTIONS = (
    "HuggingFaceH4/zephyr-7b-beta",
    "Qwen/Qwen3-0.6B",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "openai-community/gpt2",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-1.7B",
    "claude-3-7-sonnet-latest",
    "command-r-plus-08-2024",
)


def prepare(vllm_tests: Path, folder: Path) -> list[str]:
    """Make the copy, and return its files with tests, relative to the folder."""
    for name in FILES:
        target = folder / "tests" / name
        _make_packages(vllm_tests, folder, target.parent)
        target.write_text(on_one_model((vllm_tests / name).read_text()))
    for name in IMPORTED:
        shutil.copy(vllm_tests / name, folder / "tests" / name)
    for name, shim in SHIMS.items():
        shutil.copy(HERE / shim, folder / "tests" / name)
    return [f"tests/{name}" for name in FILES]


def on_one_model(source: str) -> str:
    """A test file that asks for the model that is served, whatever it names."""
    for model in {*_MODEL_CONSTANT.findall(source), *_MODELS_IN_FUNCTIONS}:
        source = source.replace(f'"{model}"', f'__import__("os").environ["{MODEL_ENV}"]')
    return source


def _make_packages(vllm_tests: Path, folder: Path, package: Path) -> None:
    """Make a folder and those above it packages, with vLLM's fixtures below the top."""
    top = folder / "tests"
    for made in (package, *package.parents):
        if not made.is_relative_to(top):
            return
        made.mkdir(parents=True, exist_ok=True)
        (made / "__init__.py").touch()
        given = vllm_tests / made.relative_to(top) / "conftest.py"
        if made != top and given.exists():
            shutil.copy(given, made / "conftest.py")
