"""What our plans tell engines and stores is understood by the installed vLLM and Mooncake."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from connectors.abilities import ask
from connectors.engine_argv import OWNED_ARGUMENTS, SHARED_LAYOUT_ARGUMENTS, abbreviated
from connectors.nixl import DEFAULT_LEASE_S
from connectors.types import EngineAbilities, JsonDict
from orchestrator.plan.build import build_plan
from orchestrator.plan.types import JobPlan
from orchestrator.spec.load import load_job_file
from tests.unit.orchestrator.samples import colocated_data, facts_of, file_text, gpu_facts, node, pd_data, plan_of, unit

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]

GOLDEN = Path(__file__).parents[1] / "golden" / "orchestrator"
NATIVE: JsonDict = {"type": "native", "cpu": {"num_bytes": "1GiB"}}
NATIVE_DISK: JsonDict = {**NATIVE, "disk": {"path": "/nvme/kv"}}
MOONCAKE_DISK: JsonDict = {"type": "mooncake", "cpu": {"num_bytes": "1GiB"}, "disk": {"path": "/nvme/kv"}}


@pytest.fixture(scope="module")
def abilities() -> EngineAbilities:
    return ask(sys.executable)


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm  # noqa: F401


def samples(abilities: EngineAbilities) -> Iterator[tuple[str, JobPlan]]:
    two = (node(0, gpus=4, gib=512), node(1, gpus=4, gib=512))
    for platform in ("cpu", "cuda"):
        known = dataclasses.replace(abilities, platform=platform)
        facts = facts_of(abilities=known) if platform == "cpu" else gpu_facts(*two, abilities=known)
        for name in ("demo", "rollouts", "colocated"):
            yield f"{name} on {platform}", build_plan(load_job_file(GOLDEN / f"{name}.toml"), facts)
        variants = {
            "none": "none",
            "native": NATIVE,
            "native and disk": NATIVE_DISK,
            "mooncake and disk": MOONCAKE_DISK,
        }
        for name, block in variants.items():
            roles = {"prefill": {"kv_offload": block}, "decode": {"kv_offload": {"cpu": {"num_bytes": "1GiB"}}}}
            yield f"{name} split on {platform}", plan_of(pd_data(roles=roles), facts)
            yield f"{name} colocated on {platform}", plan_of(colocated_data(kv_offload=block), facts)


@pytest.fixture(scope="module")
def plans(abilities: EngineAbilities) -> dict[str, JobPlan]:
    return dict(samples(abilities))


def transfer_configs(plans: dict[str, JobPlan]) -> Iterator[tuple[str, JsonDict]]:
    for name, plan in plans.items():
        for engine in plan.engines:
            argv = unit(plan, engine.name).argv
            if "--kv-transfer-config" in argv:
                yield f"{name}: {engine.name}", json.loads(argv[argv.index("--kv-transfer-config") + 1])


def test_every_transfer_config_is_one_of_vllms(plans: dict[str, JobPlan]) -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    seen: set[str] = set()
    for name, data in transfer_configs(plans):
        config = KVTransferConfig(**data)
        assert config.kv_load_failure_policy == "recompute", name
        children = config.kv_connector_extra_config.get("connectors", [])
        for child in (config, *(KVTransferConfig(**{"engine_id": config.engine_id, **child}) for child in children)):
            assert child.is_kv_transfer_instance, name
            KVConnectorFactory.get_connector_class(child)
            seen.add(str(child.kv_connector))
    assert seen == {"MultiConnector", "NixlConnector", "MooncakeStoreConnector", "OffloadingConnector"}


def test_every_extra_key_is_read_by_its_connector(plans: dict[str, JobPlan]) -> None:
    """A key that a connector does not read is ignored without a word."""
    import vllm

    root = Path(vllm.__file__).parent
    places = {
        "NixlConnector": [root / "distributed/kv_transfer/kv_connector/v1/nixl"],
        "MooncakeStoreConnector": [root / "distributed/kv_transfer/kv_connector/v1/mooncake/store"],
        "OffloadingConnector": [root / "v1/kv_offload", root / "distributed/kv_transfer/kv_connector/v1/offloading"],
    }
    sources = {
        name: "".join(file.read_text() for folder in folders for file in folder.rglob("*.py"))
        for name, folders in places.items()
    }
    for name, data in transfer_configs(plans):
        for child in data["kv_connector_extra_config"].get("connectors", [data]):
            for key in child["kv_connector_extra_config"]:
                assert f'"{key}"' in sources[child["kv_connector"]], f"{name}: {key}"


def test_the_native_disk_tier_names_a_spec_and_a_tier_that_exist() -> None:
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    assert "TieringOffloadingSpec" in OffloadingSpecFactory._registry
    assert "fs" in SecondaryTierFactory._registry


def test_every_command_line_is_understood(plans: dict[str, JobPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    for name, plan in plans.items():
        for engine in plan.engines:
            argv = unit(plan, engine.name).argv
            args, unknown = parser.parse_known_args(list(argv[4:]))
            assert unknown == [], f"{name}: {engine.name}"
            assert args.model == "/models/small"
            assert args.enable_scale_out is True
            assert args.enable_prompt_tokens_details is True


def test_no_argument_of_vllms_is_refused_as_a_beginning_of_another() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    names = {action.dest for action in parser._actions}
    assert {name for name in names if abbreviated(name)} == set()
    assert set(OWNED_ARGUMENTS) - {"node_rank"} <= names
    assert parser.parse_known_args(["--tensor-par", "2"])[0].tensor_parallel_size == 2


def test_our_idea_of_vllms_handoff_lease_is_right() -> None:
    import vllm

    folder = Path(vllm.__file__).parent / "distributed/kv_transfer/kv_connector/v1/nixl"
    text = "".join(file.read_text() for file in folder.glob("*.py"))
    assert set(re.findall(r'"kv_lease_duration", (\d+)', text)) == {str(DEFAULT_LEASE_S)}


def test_our_idea_of_vllms_defaults_is_right() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    defaults = {field.name: field.default for field in dataclasses.fields(AsyncEngineArgs)}
    assert {name: defaults[name] for name in SHARED_LAYOUT_ARGUMENTS} == dict(SHARED_LAYOUT_ARGUMENTS)


def test_every_planned_layout_variable_is_known(plans: dict[str, JobPlan], abilities: EngineAbilities) -> None:
    import vllm.envs as envs

    ours = {
        name
        for plan in plans.values()
        for engine in plan.engines
        for name in unit(plan, engine.name).env
        if name.startswith("VLLM_")
    }
    assert ours - set(envs.environment_variables) == set()
    layouts = {
        unit(plan, engine.name).env.get("VLLM_KV_CACHE_LAYOUT") for plan in plans.values() for engine in plan.engines
    }
    assert layouts - {None} <= set(abilities.kv_cache_layouts)


def test_the_store_file_is_accepted(plans: dict[str, JobPlan], tmp_path: Path) -> None:
    from vllm.distributed.mooncake_store import MooncakeStoreConfig

    for name, plan in plans.items():
        if plan.pool is None:
            continue
        path = tmp_path / "mooncake.json"
        path.write_text(file_text(plan, "mooncake.json"))
        config = MooncakeStoreConfig.from_file(str(path))
        written: dict[str, Any] = json.loads(path.read_text())
        assert dataclasses.asdict(config) == {**written, "tenant_id": "default"}, name


@pytest.mark.parametrize("program", ["mooncake_master", "mooncake_client"])
def test_every_flag_of_the_pools_programs_exists(
    program: str, plans: dict[str, JobPlan], abilities: EngineAbilities
) -> None:
    path = abilities.mooncake_master if program == "mooncake_master" else abilities.mooncake_client
    assert path is not None
    shown = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=60, check=False)
    known = set(re.findall(r"^\s+-(\w+) \(", shown.stdout + shown.stderr, flags=re.MULTILINE))
    assert known, shown.stderr[-500:]
    units = [unit for plan in plans.values() for unit in plan.units if unit.argv[0] == path]
    assert units
    used = {flag.removeprefix("--").partition("=")[0] for unit in units for flag in unit.argv[1:]}
    assert used - known == set()
