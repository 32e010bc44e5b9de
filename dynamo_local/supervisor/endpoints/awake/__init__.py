"""Whether an endpoint is to be awake: by its requests, by orders, by its schedule."""
