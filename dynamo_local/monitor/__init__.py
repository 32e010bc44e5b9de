"""Showing what a running graph does: metrics for Prometheus, event files for TensorBoard, a live view in the terminal.

    graph_watch     listens to presences, the planner and the prefill queue
    metrics         the names of our metrics, and their values at a moment (pure)
    exposition      the same under /metrics
    top_view        what `dynamo top` shows, as data (pure); top_screen draws it
    scraping        what only the frontend knows (TTFT, inter-token latency), read from its /metrics
    planner_series  the planner's observations and decisions as series and text (pure); event_files writes them

Only here are prometheus_client, rich and tensorboard imported. Nothing is decided here; what is unknown is left out.
"""
