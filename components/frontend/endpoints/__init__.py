"""The models that a frontend serves: the graph's own, and those of endpoints, which come and go while it runs."""
