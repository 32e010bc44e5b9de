"""vLLM's options as `dynamo serve` takes them: every spelling of `vllm serve`, or one line with the alternative."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.core.errors import DynamoError
from dynamo_local.engine.vllm.arguments import VllmKey, every_argument
from dynamo_local.engine.vllm.command_line import REFUSED, parse


def taken(*words: str) -> dict[str, str]:
    return {".".join(flag.path): flag.text for flag in parse(words).flags}


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["--max-model-len", "4096"], {"max-model-len": "4096"}),
        (["--max-model-len=32k"], {"max-model-len": "32k"}),
        (["--max_model_len", "4096"], {"max-model-len": "4096"}),
        (["-tp", "2"], {"tensor-parallel-size": "2"}),
        (["-tp=2", "-q", "awq"], {"tensor-parallel-size": "2", "quantization": "awq"}),
        (["--enable-prefix-caching"], {"enable-prefix-caching": "true"}),
        (["--no-enable-prefix-caching"], {"enable-prefix-caching": "false"}),
        (["--no_enable_prefix_caching"], {"enable-prefix-caching": "false"}),
        (["--enforce-eager=false"], {"enforce-eager": "false"}),
        (["--seed", "-1"], {"seed": "-1"}),
        (["-O3"], {"optimization-level": "3"}),
        (["-O", "3"], {"optimization-level": "3"}),
        (["-cc.mode=3"], {"compilation-config.mode": "3"}),
        (["--hf-overrides.rope.theta", "1e6"], {"hf-overrides.rope.theta": "1e6"}),
        (["--hf-overrides", '{"a": 1}'], {"hf-overrides": '{"a": 1}'}),
        (["--served-model-name", "a", "b"], {"served-model-name": '["a","b"]'}),
        (["--served-model-name=[a, b]"], {"served-model-name": '["a","b"]'}),
        (["--logits-processors", "m.P", "--seed=1"], {"logits-processors": '["m.P"]', "seed": "1"}),
        (["--gpu-memory-utilization", "0.5"], {"gpu-memory-utilization": "0.5"}),
        (["--device-memory-utilization", "0.5"], {"gpu-memory-utilization": "0.5"}),
    ],
)
def test_each_spelling_of_an_option_is_taken(words: list[str], flags: dict[str, str]) -> None:
    assert taken(*words) == flags


def test_items_of_a_list_may_come_one_by_one() -> None:
    flags = taken("--hf-overrides.names+", "a", "--hf-overrides.names+=b")
    assert flags == {"hf-overrides.names": '["a","b"]'}


def test_a_model_and_options_of_services_may_stand_anywhere() -> None:
    line = parse(["--seed", "1", "model", "--VllmWorker.seed=2", "--enforce-eager"])
    assert line.targets == ("model",)
    assert line.overrides == ("--VllmWorker.seed=2",)
    assert [flag.typed for flag in line.flags] == ["--seed", "--enforce-eager"]


def test_a_file_of_options_comes_before_those_typed(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("model: org/name\nmax-model-len: 4096\nenforce_eager: true\nserved-model-name: [a, b]\n")
    line = parse(["--max-model-len=1k", "--config", str(file)])
    assert [(flag.path[0], flag.text) for flag in line.flags] == [
        ("model", "org/name"),
        ("max-model-len", "4096"),
        ("enforce-eager", "true"),
        ("served-model-name", '["a","b"]'),
        ("max-model-len", "1k"),
    ]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--max-modle-len", "3"], "there is no option --max-modle-len; did you mean --max-model-len"),
        (["--nonsense"], "there is no option --nonsense; see `dynamo serve --help`"),
        (["-x"], "there is no option -x"),
        (["--max-model-len"], "--max-model-len has no value"),
        (["--max-model-len", "--seed=1"], "--max-model-len has no value"),
        (["--enforce-eager=maybe"], "--enforce-eager is a switch"),
        (["--api-key", "secret"], "--api-key is not for `dynamo serve`; .*api-key-file"),
        (["-dp", "2"], "-dp is not for `dynamo serve`; use --workers"),
        (["--data-parallel-size=2"], "use --workers"),
        (["--headless"], "--headless is not for `dynamo serve`; use --workers"),
        (["--nnodes", "2"], "a server runs on one machine"),
        (["--config", "/no/such/file"], "cannot read configuration /no/such/file"),
    ],
)
def test_what_is_not_taken_is_one_line_with_the_alternative(words: list[str], error: str) -> None:
    with pytest.raises(DynamoError, match=error) as refused:
        parse(words)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("argument", [pytest.param(each, id=each.name) for each in every_argument().values()])
def test_each_argument_is_taken_or_refused(argument: VllmKey) -> None:
    for name in (f"--{argument.name}", *argument.aliases):
        words = [name] if argument.kind == "bool" else [name, "1"]
        if argument.name == "config":
            continue  # read at once
        if argument.name in REFUSED:
            with pytest.raises(DynamoError) as refused:
                parse(words)
            assert refused.value.remedy
        else:
            assert [flag.path for flag in parse(words).flags] == [(argument.name,)]


def test_the_frontend_gets_what_it_reads_and_engines_the_rest() -> None:
    words = ["--seed=1", "--max-num-seqs=2", "-sc", "{}", "--stream-interval=4", "--max-num-queued-reqs=9"]
    assert {flag.path[0] for flag in parse(words).flags if flag.engines_only} == {"max-num-seqs"}
