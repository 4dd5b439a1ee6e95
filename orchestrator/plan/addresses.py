"""Addresses inside URLs and host:port pairs."""

from __future__ import annotations


def url_host(host: str) -> str:
    """The host as a URL writes it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
