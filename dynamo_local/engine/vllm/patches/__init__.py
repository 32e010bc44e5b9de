"""Everything that is replaced in vLLM and its libraries, and the table of it."""
