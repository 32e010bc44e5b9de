"""Asynchronous tasks, as LLM Engine has them: what is ordered, the records of their journals, how they are shown."""
