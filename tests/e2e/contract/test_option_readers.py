"""Options of `vllm serve` that are taken have somebody who reads them, and go to the processes in which he does.

Asked of vLLM's own source and parser, so that an option without effect which another version brings is noticed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dynamo_local.engine.vllm.arguments import engine_schema, every_argument, server_schema
from dynamo_local.engine.vllm.command_line import REFUSED, flag_of
from tests.e2e.contract.letter_models import Model
from tests.e2e.contract.test_server_options import serving

NOT_RUN = re.compile(
    r"engine/arg_utils|benchmarks/|snapshot/|v1/utils|entrypoints/(launchers|cli|scale_out|cohere|rl|llm|serve/dev)"
    r"|v1/engine/(core_client|coordinator|utils|llm_engine)"
)
"""Modules of vLLM's that parse arguments, or that none of our processes runs: its server, its clients of engines."""

IN_FRONTENDS = re.compile(
    r"v1/engine/(async_llm|input_processor|output_processor|detokenizer|logprobs|parallel_sampling)|v1/metrics/"
    r"|entrypoints/|renderers/|parser/|reasoning/|tool_parsers/|tokenizers/|tracing|sampling_params|pooling_params"
)

OTHER_NAMES: Mapping[str, str] = {
    "enable-lora": "lora_config",
    "enable-mamba-cache-stochastic-rounding": "enable_stochastic_rounding",
    "limit-mm-per-prompt": "limit_per_prompt",
    "lora-target-modules": "target_modules",
    "mamba-backend": "mamba_config",
    "mamba-cache-philox-rounds": "stochastic_rounding_philox_rounds",
    "mamba-ssu-algorithm": "ssu_algorithm",
    "mm-processor-device": "mm_processor_kwargs",
    "scheduling-policy": "policy",
    "spec-method": "method",
    "spec-model": "speculative_config",
    "spec-tokens": "num_speculative_tokens",
}
"""What an option is called, or is a part of, where vLLM reads it."""

FRONTENDS_NEED_NOT: Mapping[str, str] = {
    "compilation-config": "for the log of an engine's CUDA graphs, of which frontends hear nothing",
    "cudagraph-capture-sizes": "for the same log",
    "ec-transfer-config": "for statistics of an engine, of which frontends hear nothing",
    "enable-expert-parallel": "for the fingerprint of a configuration; a frontend has no ranks",
    "enable-prefix-caching": "for prompts with images, which are refused",
    "kv-transfer-config": "for fields of requests that are refused",
    "max-num-seqs": "for vLLM's offline API",
    "pipeline-parallel-size": "for the fingerprint",
    "tensor-parallel-size": "for the fingerprint",
}
"""Options that frontends do not get although code that runs there reads them."""


@cache
def readers() -> Mapping[str, set[str]]:
    """The modules that read an attribute, by its name."""
    found: dict[str, set[str]] = {}
    root = Path(vllm.__file__).parent
    for path in root.rglob("*.py"):
        module = path.relative_to(root).as_posix()
        if not NOT_RUN.match(module):
            for name in re.findall(r'(?:\.|getattr\([\w.]+, ")([a-z]\w+)\b(?!\s*=[^=])', path.read_text()):
                found.setdefault(name, set()).add(module)
    return found


def readers_of(name: str) -> set[str]:
    return readers().get(OTHER_NAMES.get(name, name.replace("-", "_")), set())


ENGINE = sorted(set(engine_schema().keys()) - set(REFUSED))


def test_engine_options_that_are_taken_are_read() -> None:
    # It acts while the configuration is made.
    assert [name for name in ENGINE if not readers_of(name)] == ["fail-on-environ-validation"]


def test_frontends_get_what_is_read_there() -> None:
    alone = {name for name in ENGINE if flag_of(name, "", name).engines_only}
    read = {name for name in alone if any(map(IN_FRONTENDS.match, readers_of(name)))}
    assert read == set(FRONTENDS_NEED_NOT)


class Noting(argparse.Namespace):
    """Parsed arguments that note which functions read them, but for those that only check them."""

    noted: dict[str, set[str]] = {}  # noqa: RUF012  # of all instances

    def __getattribute__(self, name: str) -> Any:
        reader = sys._getframe(1).f_code.co_name
        if reader not in ("validate_parsed_serve_args", "validate_chat_template"):
            Noting.noted.setdefault(name.replace("_", "-"), set()).add(reader)
        return super().__getattribute__(name)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, set[str]]]:
    parse = FlexibleArgumentParser.parse_args

    def parse_noting(*arguments: Any, **named: Any) -> argparse.Namespace:
        return Noting(**vars(parse(*arguments, **named)))

    monkeypatch.setattr(FlexibleArgumentParser, "parse_args", parse_noting)
    yield Noting.noted
    Noting.noted.clear()


async def test_options_of_vllms_server_that_are_taken_are_read(noted: dict[str, set[str]], tmp_path: Path) -> None:
    """By the code that makes the application, serves it and answers: ours, and vLLM's that ours calls."""
    model = Model("m", "A", tmp_path, **{"enable-log-requests": True})
    await model.application.start(lambda _: None)
    try:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "stream": True}
        assert (await model.client.post("/v1/chat/completions", json=body)).status_code == 200
    finally:
        await model.close()
    async with serving(tmp_path):
        pass
    # `from_cli_args` reads whatever an engine has.
    of_server = set(every_argument()) - {name.replace("_", "-") for name in vars(AsyncEngineArgs())}
    assert set(server_schema().keys()) <= of_server | {"lora-modules"}
    # The prefix is read before there is a parser.
    assert of_server - set(REFUSED) - {"root-path"} - set(noted) == set()
