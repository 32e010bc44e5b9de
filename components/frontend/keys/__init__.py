"""API keys in the frontend: orders of administrators, the registry as its file says, and the limits of each key."""
