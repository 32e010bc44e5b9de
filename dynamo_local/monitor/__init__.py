"""Shows what a running graph does: metrics for Prometheus, and `dynamo top`. Leaves out what is unknown.

    graph_watch     follows presences, the planner's reports and the length of the prefill queue
    families        the metrics: name, kind, help and labels of each
    metrics         their values (pure)
    exposition      serves them under /metrics
    top/            what `dynamo top` shows, as data, and drawn
    scraping        reads TTFT and inter-token latency from the frontend's /metrics
    rates           rates of counters (pure)

Of the product, only this package imports prometheus_client and rich.
"""
