"""vLLM's OpenAI server in front of a dispatcher."""
