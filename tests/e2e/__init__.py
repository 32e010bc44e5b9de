"""The whole system with real vLLM, real NATS and real circus, through the `openai` client and the command line."""
