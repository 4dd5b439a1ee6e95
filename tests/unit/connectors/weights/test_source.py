"""What sources say of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.weights.source import FetchError, source_field


@pytest.mark.parametrize("fields", [{}, {"port": "80"}, {"port": True}, {"port": None}])
def test_a_field_that_is_missing_or_of_another_kind_is_named(fields: dict[str, Any]) -> None:
    with pytest.raises(FetchError, match=r"port \(a whole number\) for transport nixl"):
        source_field({"transport": "nixl", **fields}, "port", int)


def test_fields_are_read() -> None:
    assert source_field({"port": 80}, "port", int) == 80
    assert source_field({"path": "/a"}, "path", str) == "/a"
