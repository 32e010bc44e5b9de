"""The planner at work: its loop, metrics, and recorders of its decisions."""
