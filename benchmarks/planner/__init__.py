"""The planner under a load that swings: latency kept, and devices held for it."""
