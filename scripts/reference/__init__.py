"""Documentation generated from the code: the command line, configuration keys and environment variables."""
