"""`/page/`: the web page, as plain files of the package. They need no token; what they show is asked for with one."""

from __future__ import annotations

import os
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from orchestrator.api.access import PAGE

FOLDER = Path(__file__).with_name("page")
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        # Texts of jobs can become nodes by textContent alone: a browser refuses the rest.
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # Asked for again each time, and answered with a 304: the files of one version belong together.
    "cache-control": "no-cache",
}


class PageFiles(StaticFiles):
    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(HEADERS)
        return response


def add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def to_page() -> RedirectResponse:
        return RedirectResponse(f".{PAGE}")

    app.mount(PAGE, PageFiles(directory=FOLDER, html=True))
