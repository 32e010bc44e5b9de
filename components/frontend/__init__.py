"""The frontend service: vLLM's OpenAI server, and the live requests behind it."""
