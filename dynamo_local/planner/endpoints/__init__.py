"""The planner's part for endpoints: pulls what is known of them, and has numbers of workers ordered from the server,
which alone changes them. Decisions are made in core/planning/endpoints."""
