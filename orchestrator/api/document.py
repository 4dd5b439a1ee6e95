"""The OpenAPI document: what FastAPI sees in the routes, and what it cannot see there."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from orchestrator.api.access import OPEN_PATHS
from orchestrator.api.problems import Problem
from orchestrator.spec.job import JobSpec

_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "password": {
        "type": "http",
        "scheme": "basic",
        "description": "Any user name, with the token as password: for clients that can only be given a URL.",
    },
}


class DocumentedApi(FastAPI):
    """Adds job files, problems and tokens to its document."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is not None:
            return self.openapi_schema
        document = super().openapi()
        models = models_json_schema(
            [(JobSpec, "validation"), (Problem, "serialization")], ref_template="#/components/schemas/{model}"
        )
        components = document["components"]
        components["schemas"] |= models[1]["$defs"]
        components["securitySchemes"] = _SCHEMES
        document["security"] = [{scheme: []} for scheme in _SCHEMES]
        for path in OPEN_PATHS:
            for operation in document["paths"][path].values():
                operation["security"] = []
        return document
