"""API keys: what each allows, which there are, and the limits on what is asked with them. Pure."""
