"""The planner's part for endpoints: pulls what is known of them, and orders numbers of workers from the server, which
alone changes them. Decisions are made in core/planning/endpoints."""
