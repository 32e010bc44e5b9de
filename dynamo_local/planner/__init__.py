"""The running planner: its loop, metrics, and recorders of its decisions. Decisions are made in core/planning."""
