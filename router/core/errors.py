"""Errors of the router, by who must act.

RouterError
+-- RequestRefused      the client: the request can't be served as it is
+-- InvalidTransition   us: an event came that the flow's table does not know
"""

from __future__ import annotations


class RouterError(Exception):
    """Base of all errors of this folder."""


class RequestRefused(RouterError):
    """The request is answered with 400 and never reaches an engine."""

    def __init__(self, message: str, *, param: str | None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """The field that the client has to change; None where the whole body is at fault."""


class InvalidTransition(RouterError):
    """A pair (state, event) that is missing from the table, with the story so far."""
