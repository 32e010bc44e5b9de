"""The router: one place that knows what every worker has been given, for any number of frontends."""

from components.router.router import Router

__all__ = ["Router"]
