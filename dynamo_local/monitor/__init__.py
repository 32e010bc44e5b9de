"""Shows what a running graph does: metrics for Prometheus, and `dynamo top`. Leaves out what is unknown.

    graph_watch     follows presences, the planner's reports and the length of the prefill queue
    metrics         the metrics and their values (pure)
    exposition      serves them under /metrics
    top             what `dynamo top` shows, as data, and what keeps it current
    screen          draws it
    scraping        reads TTFT and inter-token latency from the frontend's /metrics; rates of counters

Of the product, only this package imports prometheus_client and rich.
"""
