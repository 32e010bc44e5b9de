"""vLLM, and nothing but vLLM: its engine core as an engine, its OpenAI server before a dispatcher.

The only package that imports vllm or torch, so that an upgrade of vLLM touches this folder and its contract tests.
`arguments` is the exception that imports neither: it tells the command line which settings vLLM has.
"""
