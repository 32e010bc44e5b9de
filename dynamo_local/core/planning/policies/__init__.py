"""The planner's policies. Pure."""
