"""Patches of how an engine core and its workers treat requests: turns, slots, continuation, grammars, tokens,
adapters."""

from __future__ import annotations


def patch_requests() -> None:
    """Apply the patches to this process, and so to the processes forked from it. A second call changes nothing.

    Imports vLLM and torch, hence the imports in here.
    """
    from dynamo_local.engine.vllm.patches.requests.adapter_fit import refuse_adapters_of_other_models
    from dynamo_local.engine.vllm.patches.requests.continued import continue_requests
    from dynamo_local.engine.vllm.patches.requests.fair_waiting import have_requests_take_turns
    from dynamo_local.engine.vllm.patches.requests.grammar_deadline import limit_grammar_compilation
    from dynamo_local.engine.vllm.patches.requests.make_room import have_urgent_requests_find_room
    from dynamo_local.engine.vllm.patches.requests.token_logprobs import separate_logprobs

    continue_requests()
    limit_grammar_compilation()
    separate_logprobs()
    have_requests_take_turns()
    have_urgent_requests_find_room()
    refuse_adapters_of_other_models()
