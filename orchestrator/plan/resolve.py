"""JobSpec -> RoleConfigs: what each role gets once inheritance is worked out. Comes before `build.py`.

Engine arguments: the role's are stronger than the job's. Offload: a role inherits the job's block, changes what it
names, or switches it off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from connectors.chain import ChainReading, read_transfer_config
from connectors.engine_argv import fenced, parallel_sizes
from connectors.types import JsonDict, ParallelSizes, Role
from orchestrator.errors import Complaint
from orchestrator.spec.complaints import describe
from orchestrator.spec.job import JobSpec, RoleName, RoleSpec
from orchestrator.spec.offload import KvOffload, MooncakeOffload, NativeOffload, NoOffload

_KV_OFFLOAD: TypeAdapter[MooncakeOffload | NativeOffload | NoOffload] = TypeAdapter(KvOffload)
_KIND: dict[str, type[BaseModel]] = {"mooncake": MooncakeOffload, "native": NativeOffload, "none": NoOffload}
MOST_RANKS = 4096
"""Of one role. A plan lists every process, so what no fleet has must be refused before it is laid out."""


@dataclass(frozen=True, kw_only=True)
class RoleConfig:
    """One role, everything inherited."""

    role: Role
    replicas: int
    engine: JsonDict
    """vLLM arguments as the user set them, and, from `effective.py` on, with what was chosen; kv_transfer_config
    apart."""
    transfer_override: JsonDict | None
    """An explicit engine.kv_transfer_config, which wins over the composed chain."""
    sizes: ParallelSizes
    env: dict[str, str]
    offload: MooncakeOffload | NativeOffload | NoOffload
    """Where its KV really goes: an explicit transfer config without the block's connector uses none of the block."""

    @property
    def reading(self) -> ChainReading | None:
        """What an explicit transfer config does; None where the chain is composed."""
        return None if self.transfer_override is None else read_transfer_config(self.transfer_override)


@dataclass(frozen=True, kw_only=True)
class Resolved:
    roles: tuple[RoleConfig, ...]
    complaints: tuple[Complaint, ...]
    """Roles that have one are left out of `roles`."""


def resolve_roles(spec: JobSpec) -> Resolved:
    """Work out every role that the job names, in the order prefill, decode, colocated."""
    roles: list[RoleConfig] = []
    complaints: list[Complaint] = []
    for role in get_args(RoleName):
        role_spec: RoleSpec | None = getattr(spec.roles, role)
        if role_spec is None:
            continue
        found: list[Complaint] = []
        offload = _resolve_offload(role, role_spec.kv_offload, spec.kv_offload, found)
        engine = dict(sorted({**spec.engine, **role_spec.engine}.items()))
        override = _explicit_transfer_config(spec, role, engine.pop("kv_transfer_config", None), found)
        sizes = _sizes(spec, role, engine, found)
        _check_middleware(spec, role, engine, found)
        if sizes is not None and role_spec.replicas * sizes.ranks > MOST_RANKS:
            found.append(_too_many(role, role_spec.replicas, sizes))
        if offload is not None and sizes is not None and not found:
            env = dict(sorted({**spec.env, **role_spec.env}.items()))
            roles.append(
                RoleConfig(
                    role=role,
                    replicas=role_spec.replicas,
                    engine=engine,
                    transfer_override=override,
                    sizes=sizes,
                    env=env,
                    offload=_used_offload(offload, override),
                )
            )
        complaints += found
    return Resolved(roles=tuple(roles), complaints=tuple(dict.fromkeys(complaints)))


def _used_offload(
    offload: MooncakeOffload | NativeOffload | NoOffload, override: JsonDict | None
) -> MooncakeOffload | NativeOffload | NoOffload:
    if override is None:
        return offload
    reading = read_transfer_config(override)
    used = {"mooncake": reading.joins_pool, "native": reading.has_native_tier, "none": True}
    return offload if used[offload.type] else NoOffload()


def engine_field(spec: JobSpec, role: Role, name: str) -> str:
    """Where the job file sets this engine argument of this role."""
    return _field(getattr(spec.roles, role).engine, "engine", role, name)


def env_field(spec: JobSpec, role: Role, name: str) -> str:
    """Where the job file sets this variable of this role's engines."""
    return _field(getattr(spec.roles, role).env, "env", role, name)


def _field(own: Mapping[str, Any], table: str, role: Role, name: str) -> str:
    return f"roles.{role}.{table}.{name}" if name in own else f"{table}.{name}"


def deep_merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with what `over` names changed; tables are merged, everything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = deep_merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def _resolve_offload(
    role: Role, own: Mapping[str, Any] | str, inherited: Mapping[str, Any] | str, found: list[Complaint]
) -> MooncakeOffload | NativeOffload | NoOffload | None:
    base = {"type": "none"} if isinstance(inherited, str) else inherited
    if isinstance(own, str):
        return NoOffload() if own == "none" else _offload_model(base, {}, role, found)
    if own.get("type", base.get("type")) == "none":
        if set(own) <= {"type"}:
            return NoOffload()
        problem = "changes a block that the job does not have" if "type" not in own else "is none, with other keys"
        mend = 'set type = "mooncake" or "native"'
        found.append(Complaint(field=f"roles.{role}.kv_offload", problem=problem, mend=mend))
        return None
    return _offload_model(_of_same_type(base, own), own, role, found)


def _of_same_type(base: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """What can be inherited: all of it within one type, only the shared CPU size and disk path across types."""
    if own.get("type", base.get("type")) == base.get("type"):
        return base
    shared = {key: base[key] for key in ("cpu",) if key in base}
    disk = base.get("disk")
    if isinstance(disk, Mapping) and "path" in disk:
        shared["disk"] = {"path": disk["path"]}
    return shared


def _offload_model(
    base: Mapping[str, Any], own: Mapping[str, Any], role: Role, found: list[Complaint]
) -> MooncakeOffload | NativeOffload | NoOffload | None:
    """The block of a role, or complaints under the name of the place where the wrong value stands."""
    data = deep_merge(base, own)
    try:
        return _KV_OFFLOAD.validate_python(data)
    except ValidationError as error:
        kind = _KIND.get(str(data.get("type")), MooncakeOffload)
        for detail in error.errors():
            location = [str(part) for part in detail["loc"] if part not in _KIND]
            complaint = describe({**detail, "loc": tuple(location)}, kind)
            inherited = not own or ("type" in base and _has(base, own, location))
            block = "kv_offload" if inherited else f"roles.{role}.kv_offload"
            name = ".".join([block, *location])
            mend = complaint.mend or _mend(detail["type"], kind)
            found.append(Complaint(field=name, problem=_problem(complaint, detail), mend=mend))
        return None


def _has(base: Mapping[str, Any], own: Mapping[str, Any], location: Sequence[str]) -> bool:
    """Whether the value at `location` stands in `base` and is not changed by `own`."""
    for part in location:
        if isinstance(own, Mapping) and part in own:
            own = own[part]
            base = base.get(part, {}) if isinstance(base, Mapping) else {}
        else:
            return isinstance(base, Mapping) and part in base
    return False


def _problem(complaint: Complaint, detail: ErrorDetails) -> str:
    if detail["type"] == "union_tag_not_found":
        return "has no type"
    if detail["type"] == "union_tag_invalid":
        return f"has type {detail['ctx']['tag']!r}"
    return complaint.problem


def _mend(error_type: str, kind: type[BaseModel]) -> str:
    if error_type == "greater_than" and kind is NativeOffload:
        return 'give a positive size, or kv_offload = "none"'
    if error_type.startswith("union_tag"):
        return 'set type = "mooncake", "native" or "none"'
    return ""


def _explicit_transfer_config(spec: JobSpec, role: Role, value: Any, found: list[Complaint]) -> JsonDict | None:
    if value is None or isinstance(value, dict):
        return value
    found.append(
        Complaint(
            field=engine_field(spec, role, "kv_transfer_config"),
            problem=f"is {type(value).__name__}, not a table",
            mend="write it as a table; Headrace makes the JSON",
        )
    )
    return None


def _check_middleware(spec: JobSpec, role: Role, engine: Mapping[str, Any], found: list[Complaint]) -> None:
    try:
        fenced(engine.get("middleware"))
    except ValueError as error:
        field = engine_field(spec, role, "middleware")
        mend = "give the import paths that vLLM's --middleware takes"
        found.append(Complaint(field=field, problem=f"is {error}", mend=mend))


def _too_many(role: Role, replicas: int, sizes: ParallelSizes) -> Complaint:
    problem = f"{replicas} engines of {sizes.ranks} ranks are more than the {MOST_RANKS} ranks that a role may have"
    return Complaint(field=f"roles.{role}.replicas", problem=problem, mend="lower it, or the parallel sizes")


def _sizes(spec: JobSpec, role: Role, engine: Mapping[str, Any], found: list[Complaint]) -> ParallelSizes | None:
    try:
        return parallel_sizes(engine)
    except ValueError as error:
        name, _, problem = str(error).partition(" ")
        found.append(
            Complaint(field=engine_field(spec, role, name), problem=problem, mend="give a whole number, 1 or more")
        )
        return None
