"""Patches of vLLM's OpenAI server and of uvicorn, in the frontend's process."""
