"""SmolLM2-135M-Instruct, a real language model that comes in a Python package, and how its answers are judged."""
