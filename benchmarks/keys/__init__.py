"""API keys: what checking them costs, and whether limits hold while frontends are killed."""
