"""The router: a service that assigns the requests of all frontends to workers, and keeps account of their load."""

from components.router.router import Router

__all__ = ["Router"]
