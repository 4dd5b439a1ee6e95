"""What the installed stack is asked for, it still answers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from connectors.abilities import ask
from connectors.reference import REFERENCE_ABILITIES

pytestmark = [
    pytest.mark.stack,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(300),
]


def test_the_installed_stack_can_do_what_the_plans_build_on() -> None:
    found = ask(sys.executable)
    assert found.python == sys.executable
    for program in (found.mooncake_master, found.mooncake_client):
        assert program is not None
        assert Path(program).is_file()
    assert found.nixl_version is not None
    assert found.mooncake_version is not None
    assert found.load_failure_policy
    assert found.handoff_lease
    assert found.save_decode_cache
    assert found.scale_out_flag
    assert "BLHNC" in found.kv_cache_layouts


def test_the_reference_is_the_installed_version() -> None:
    """The abilities that stand in where no engine is installed are those of the version we test with."""
    found = ask(sys.executable)
    assert found.vllm_version == REFERENCE_ABILITIES.vllm_version
    asked = (
        "save_decode_cache",
        "cross_layers_blocks",
        "scale_out_flag",
        "per_request_metrics",
        "quiet_access_log",
        "load_failure_policy",
        "handoff_lease",
        "middleware_flag",
        "weight_transfer",
        "plugin_path",
    )
    assert {name: getattr(found, name) for name in (*asked, "kv_cache_layouts")} == {
        name: getattr(REFERENCE_ABILITIES, name) for name in (*asked, "kv_cache_layouts")
    }


def test_the_names_that_are_looked_for_are_attributes_of_the_connectors() -> None:
    """`ask_engine.py` searches source text; here the same is asked of the imported code."""
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.scheduler import MooncakeStoreScheduler
    from vllm.entrypoints.launchers.cli_args import FrontendArgs
    from vllm.v1.kv_cache_layout import KVCacheLayout

    found = ask(sys.executable)
    assert hasattr(KVTransferConfig, "kv_load_failure_policy") is found.load_failure_policy
    assert hasattr(FrontendArgs, "enable_scale_out") is found.scale_out_flag
    assert tuple(layout.name for layout in KVCacheLayout) == found.kv_cache_layouts
    assert "save_decode_cache" in MooncakeStoreScheduler.__init__.__code__.co_consts
