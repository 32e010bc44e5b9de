"""vLLM, and nothing but vLLM: its engine core as an engine, its OpenAI server before a dispatcher.

The only package that imports vllm or torch, so that an upgrade of vLLM touches this folder and its contract tests.
`arguments` is the exception that imports neither: it tells the command line which settings vLLM has.
"""

from __future__ import annotations

VLLM_PRELOAD = f"{__name__}.preload"
"""Module to import before a worker is forked (`@service(preload=...)`)."""
