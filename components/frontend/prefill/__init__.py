"""Prompts that prefill workers compute."""
