"""The settings variable, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from connectors.vllm_plugin.weights.settings import SETTINGS_VARIABLE, WeightSettings, read_settings


def test_without_the_variable_everything_is_as_usual() -> None:
    assert read_settings({}) == WeightSettings()


def test_fields_are_read() -> None:
    expected = WeightSettings(
        mode="cpu_prefetch", keep_copy=True, host="10.0.0.1", sources=({"transport": "nixl"},), fetch_cores=(3, 4)
    )
    assert read_settings({SETTINGS_VARIABLE: json.dumps(asdict(expected))}) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "JSON object"),
        ('{"mod": 1}', "mode"),
        ('{"mode": "x"}', "gpu_fetch"),
        ('{"prefetch_share": 0}', "prefetch_share"),
        ('{"prefetch_share": "all"}', "prefetch_share"),
        ('{"keep_copy": "no"}', "keep_copy"),
        ('{"host": ""}', "host"),
        ('{"sources": {"transport": "path"}}', "sources"),
        ('{"fetch_cores": ["0"]}', "fetch_cores"),
    ],
)
def test_what_is_wrong_is_named(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=SETTINGS_VARIABLE) as caught:
        read_settings({SETTINGS_VARIABLE: text})
    assert says in str(caught.value)
