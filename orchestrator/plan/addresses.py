"""Addresses inside URLs and host:port pairs, and of the files that several units read."""

from __future__ import annotations

from pathlib import Path


def url_host(host: str) -> str:
    """The host as a URL writes it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def token_file(job_dir: Path) -> Path:
    """The job's bearer token, asked for by the router's internal port and by every engine."""
    return job_dir / "token"
