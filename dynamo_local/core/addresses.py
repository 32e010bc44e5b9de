"""Addresses as URLs write them."""

from __future__ import annotations


def host_in_url(host: str) -> str:
    """Return the host as it stands before a port: an IPv6 address in brackets (RFC 3986, section 3.2.2)."""
    return f"[{host}]" if ":" in host else host
