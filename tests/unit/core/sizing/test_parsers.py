"""Parsers by family and template. The templates are cut down to what tells their formats apart."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_local.core.sizing.model_facts import ModelFacts
from dynamo_local.core.sizing.parsers import AUTO_TOOLS, REASONING_PARSER, TOOL_PARSER, choose_parsers

TOOLS = "{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
HERMES = TOOLS + '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
XML = TOOLS + "<tool_call>\n<function=example>\n<parameter=one>\n</parameter>\n</function>\n</tool_call>"
THINK = "{% if '</think>' in content %}{% endif %}<think>"
LLAMA3 = TOOLS + 'Environment: ipython {"name": function name, "parameters": dictionary}'
DEEPSEEK = "<\uff5ctool\u2581calls\u2581begin\uff5c>"


@pytest.mark.parametrize(
    ("model_type", "template", "tools", "reasoning"),
    [
        ("qwen2", HERMES, "hermes", None),
        ("qwen2", HERMES + THINK, "hermes", "deepseek_r1"),
        ("qwen3", HERMES + THINK, "hermes", "qwen3"),
        ("qwen3", HERMES, "hermes", None),
        ("qwen3_moe", XML, "qwen3_coder", None),
        ("llama", LLAMA3, "llama3_json", None),
        ("llama", HERMES, "hermes", None),
        ("llama4", TOOLS, "llama4_pythonic", None),
        ("mistral", TOOLS + "[TOOL_CALLS]", "mistral", None),
        ("gpt_oss", None, "openai", "openai_gptoss"),
        ("deepseek_v3", TOOLS + DEEPSEEK + "```json", "deepseek_v3", None),
        ("deepseek_v3", TOOLS + DEEPSEEK + "</think>{% if thinking %}", "deepseek_v31", "deepseek_v3"),
        ("glm4_moe", TOOLS + "<tool_call>name<arg_key>" + THINK, "glm45", "glm45"),
        ("kimi_k2", TOOLS + "<|tool_calls_section_begin|>", "kimi_k2", None),
        ("granite", TOOLS + "<|tool_call|>", "granite", None),
        ("granitemoehybrid", HERMES, "granite4", None),
        ("phi3", TOOLS + "<|tool|>", "phi4_mini_json", None),
        ("gemma4", TOOLS, "gemma4", None),
        ("llama", TOOLS, None, None),
        ("llama", "{% for message in messages %}{{ message['tool_calls'] }}{% endfor %} tools", None, None),
        ("llama", None, None, None),
        (None, HERMES, "hermes", None),
    ],
)
def test_the_family_and_the_template_decide(
    model_type: str | None, template: str | None, tools: str | None, reasoning: str | None
) -> None:
    choices = choose_parsers(ModelFacts(model_type=model_type, text_model_type=model_type, chat_template=template))
    chosen = {choice.key: choice.value for choice in choices}
    assert chosen[TOOL_PARSER] == tools
    assert chosen[REASONING_PARSER] == reasoning
    assert chosen.get(AUTO_TOOLS) is (True if tools else None)
    assert all(choice.reason for choice in choices)


def test_a_reasoning_parser_is_for_engines_as_well_and_a_tool_parser_is_not() -> None:
    readers = {c.key: c.readers for c in choose_parsers(ModelFacts(model_type="gpt_oss", text_model_type="gpt_oss"))}
    assert readers == {AUTO_TOOLS: "frontend", TOOL_PARSER: "frontend", REASONING_PARSER: "all"}


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({TOOL_PARSER: "mistral"}, {AUTO_TOOLS: True, REASONING_PARSER: "qwen3"}),
        ({AUTO_TOOLS: True}, {TOOL_PARSER: "hermes", REASONING_PARSER: "qwen3"}),
        ({AUTO_TOOLS: False}, {REASONING_PARSER: "qwen3"}),
        ({AUTO_TOOLS: False, TOOL_PARSER: "mistral"}, {REASONING_PARSER: "qwen3"}),
        ({REASONING_PARSER: "other"}, {AUTO_TOOLS: True, TOOL_PARSER: "hermes"}),
        ({REASONING_PARSER: "other", TOOL_PARSER: "mistral", AUTO_TOOLS: True}, {}),
    ],
)
def test_what_is_given_is_left_alone(given: dict[str, Any], chosen: dict[str, Any]) -> None:
    facts = ModelFacts(model_type="qwen3", text_model_type="qwen3", chat_template=HERMES + THINK)
    assert {choice.key: choice.value for choice in choose_parsers(facts, given)} == chosen
