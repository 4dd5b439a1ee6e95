"""How much of a list one answer has."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

PAGE = 100
LONGEST_PAGE = 1000
Limit = Annotated[int, Field(ge=1, le=LONGEST_PAGE)]
