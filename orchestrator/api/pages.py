"""How much of a list one answer has, and what can be asked for by its number."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

PAGE = 100
LONGEST_PAGE = 1000
MOST_LOG_LINES = 10_000
NUMBERS_END = 2**63
"""Those of events, updates and requests are below."""
Limit = Annotated[int, Field(ge=1, le=LONGEST_PAGE)]
