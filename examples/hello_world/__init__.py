"""The smallest graph: three plain services that stream through each other. No model, no vLLM."""

from __future__ import annotations
