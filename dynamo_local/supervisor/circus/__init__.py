"""circusd: its process, control endpoint, events, watchers, and its replacement when it dies."""
