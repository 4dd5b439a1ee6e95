"""A control plane over HTTP, on fakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx

from orchestrator.api.access import Access
from orchestrator.api.server import build_app
from orchestrator.control.over_http import HttpControlPlane
from tests.fakes.fake_launch import FakeFleet

TOKEN = "the-token"


def served(fleet: FakeFleet, serve: Callable[[Any], httpx.Client]) -> HttpControlPlane:
    url = str(serve(build_app(fleet.service(), Access({TOKEN: "admin"}))).base_url)
    return HttpControlPlane(url, TOKEN, is_local=True)
