"""Which of vLLM's parsers of tool calls and of reasoning fits a model, by its family and its chat template.

Source: the pages "Tool Calling" and "Reasoning Outputs" of vLLM's documentation
(https://docs.vllm.ai/en/stable/features/tool_calling.html, .../reasoning_outputs.html), and what each parser in
`vllm/tool_parsers` and `vllm/reasoning` looks for. A template shows the format that its model was trained on, so where
one family has several formats, the template decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dynamo_local.core.sizing.machine import Choice
from dynamo_local.core.sizing.model_facts import ModelFacts

AUTO_TOOLS = "enable-auto-tool-choice"
TOOL_PARSER = "tool-call-parser"
REASONING_PARSER = "reasoning-parser"

PARSER_KEYS = (AUTO_TOOLS, TOOL_PARSER, REASONING_PARSER)
"""The arguments that are chosen here."""

# With the full-width bars and the lower blocks of these models' special tokens.
_DEEPSEEK_CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_DEEPSEEK_ASSISTANT = "<\uff5cAssistant\uff5c>"
_STEP_CALLS = "<\uff5ctool_calls_begin\uff5c>"


@dataclass(frozen=True)
class Rule:
    """A parser, and the models that it is for.

    `types`: beginnings of `model_type`; empty: any. `shows`: what the chat template must contain, all of it. `lacks`:
    what it must not contain. `untemplated`: the family is enough, whatever the template is.
    """

    parser: str
    types: tuple[str, ...] = ()
    shows: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    untemplated: bool = False

    def fits(self, model_type: str, template: str | None) -> bool:
        if self.types and not model_type.startswith(self.types):
            return False
        if template is None:
            return self.untemplated
        return all(text in template for text in self.shows) and not any(text in template for text in self.lacks)


TOOL_RULES: tuple[Rule, ...] = (
    Rule("openai", ("gpt_oss",), untemplated=True),
    Rule("kimi_k2", shows=("<|tool_calls_section_begin|>",)),
    Rule("deepseek_v3", ("deepseek_v3", "kimi"), (_DEEPSEEK_CALLS, "```json")),
    Rule("deepseek_v31", ("deepseek_v3",), (_DEEPSEEK_CALLS,)),
    Rule("minimax_m2", shows=("<minimax:tool_call>",)),
    Rule("seed_oss", shows=("<seed:tool_call>",)),
    Rule("longcat", shows=("<longcat_tool_call>",)),
    Rule("dots", shows=("<dots_function_call>",)),
    Rule("lfm2", ("lfm2",), ("<|tool_call_start|>",)),
    Rule("lfm2", ("lfm2",), ("<|tool_list_start|>",)),
    Rule("functiongemma", ("gemma3",), ("<start_function_call>",)),
    Rule("gemma4", ("gemma4",)),
    Rule("step3p5", ("step3p5",)),
    Rule("step3", ("step3",), (_STEP_CALLS,)),
    Rule("qwen3_coder", ("qwen3", "nemotron"), ("<function=", "<parameter=")),
    Rule("glm45", ("glm4", "glm5"), ("<arg_key>",)),
    Rule("hunyuan_a13b", ("hunyuan",), ("<tool_calls>",)),
    Rule("jamba", ("jamba",), ("<tool_calls>",)),
    Rule("ernie45", ("ernie4_5",), ("<tool_call>",)),
    Rule("olmo3", ("olmo3",), ("<function_calls>",)),
    Rule("apertus", ("apertus",), ("<|tools_prefix|>",)),
    Rule("internlm", ("internlm2", "internlm3"), ("<|plugin|>",)),
    Rule("granite", ("granite",), ("<|tool_call|>",)),
    Rule("granite4", ("granite",), ("<tool_call>",)),
    Rule("phi4_mini_json", ("phi3", "phi4"), ("<|tool|>",)),
    Rule("phi4_mini_json", ("phi3", "phi4"), ("<|tool_call|>",)),
    Rule("llama4_pythonic", ("llama4",)),
    Rule("llama3_json", ("llama", "mllama"), ("ipython", '"parameters"')),
    Rule("mistral", shows=("[TOOL_CALLS]",)),
    Rule("hermes", shows=("<tool_call>", "name"), lacks=("<function=", "<arg_key>", "<invoke")),
)
"""The first rule that fits decides."""

REASONING_RULES: tuple[Rule, ...] = (
    Rule("openai_gptoss", ("gpt_oss",), untemplated=True),
    Rule("qwen3", ("qwen3",), ("<think>",)),
    Rule("deepseek_r1", ("qwen2",), ("<think>",)),
    # DeepSeek's own templates take `thinking` as a variable where a request may switch it.
    Rule("deepseek_v3", ("deepseek_v3",), ("</think>", "thinking")),
    Rule("deepseek_r1", ("deepseek_v3", "qwen2", "llama"), ("</think>", _DEEPSEEK_ASSISTANT)),
    Rule("glm45", ("glm4", "glm5"), ("<think>",)),
    Rule("minimax_m2_append_think", ("minimax",), ("<think>",)),
    Rule("seed_oss", ("seed_oss",), ("<seed:think>",)),
    Rule("hunyuan_a13b", ("hunyuan",), ("<think>",)),
    Rule("ernie45", ("ernie4_5",), ("<think>",)),
    Rule("kimi_k2", ("kimi",), ("<think>",)),
    Rule("nemotron_v3", ("nemotron",), ("<think>",)),
    Rule("olmo3", ("olmo3",), ("<think>",)),
    Rule("step3p5", ("step3p5",), ("<think>",)),
    Rule("step3", ("step3",), ("<think>",)),
    Rule("granite", ("granite",), ("Here is my thought process",)),
    Rule("gemma4", ("gemma4",), ("think",)),
)

# The variable `tools` of a template, and not a word of its text.
_LISTS_TOOLS = re.compile(r"\{[%{][^}]*\btools\b")


def choose_parsers(facts: ModelFacts, given: Mapping[str, Any] = MappingProxyType({})) -> tuple[Choice, ...]:
    """The parsers that fit, each with its reason; value None: none fits. `given`: what the user gives of PARSER_KEYS,
    which is left alone."""
    choices = [] if given.get(AUTO_TOOLS) is False else _tools(facts, given)
    if given.get(REASONING_PARSER) is None:
        choices.append(_reasoning(facts))
    return tuple(choice for choice in choices if given.get(choice.key) is None)


def _tools(facts: ModelFacts, given: Mapping[str, Any]) -> list[Choice]:
    if given.get(TOOL_PARSER) is not None:
        return [Choice(AUTO_TOOLS, True, "a parser is given", "frontend")]
    template = facts.chat_template
    found = _first(TOOL_RULES, facts)
    if found is not None and not found.untemplated and not _LISTS_TOOLS.search(template or ""):
        found = None
    if found is None:
        return [Choice(TOOL_PARSER, None, _why_none(template), "frontend")]
    return [
        Choice(AUTO_TOOLS, True, "requests with tools are answered, not refused", "frontend"),
        Choice(TOOL_PARSER, found.parser, _reason(facts, found), "frontend"),
    ]


def _why_none(template: str | None) -> str:
    if template is None:
        return "the model has no chat template"
    if not _LISTS_TOOLS.search(template):
        return "the model's chat template has no place for tools"
    return "no parser is known for the format of the model's chat template; --tool-call-parser names one"


def _reasoning(facts: ModelFacts) -> Choice:
    found = _first(REASONING_RULES, facts)
    if found is None:
        return Choice(REASONING_PARSER, None, "the model's chat template shows no reasoning", "all")
    return Choice(REASONING_PARSER, found.parser, _reason(facts, found), "all")


def _first(rules: Sequence[Rule], facts: ModelFacts) -> Rule | None:
    names = [name for name in (facts.model_type, facts.text_model_type) if name]
    return next((rule for rule in rules if any(rule.fits(name, facts.chat_template) for name in names or [""])), None)


def _reason(facts: ModelFacts, rule: Rule) -> str:
    family = f"model type {facts.model_type}" if rule.types else ""
    shown = f"{rule.shows[0]} in the chat template" if rule.shows else ""
    return ", ".join(part for part in (family, shown) if part)
