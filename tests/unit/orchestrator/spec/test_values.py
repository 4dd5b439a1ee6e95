"""Values that no program could be given are refused with their field, wherever in a job file they stand."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import Complaint, SpecError
from orchestrator.spec.load import job_from_data, load_job_file
from tests.unit.orchestrator.samples import pd_data


def complaints_of(data: dict[str, Any]) -> tuple[Complaint, ...]:
    with pytest.raises(SpecError) as caught:
        job_from_data(data, source="x")
    return caught.value.complaints


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("a\0b", "NUL character"),
        ("a\udc80b", "not valid text"),
        (10**30, "64-bit"),
        (-(10**30), "64-bit"),
        (datetime.date(2020, 1, 1), "date or time"),
        (datetime.time(12), "date or time"),
        ([1, "a\0b"], "NUL character"),
        ({"deep": {"deeper": 10**30}}, "64-bit"),
        ({"a\0b": 1}, "NUL character"),
    ],
)
def test_an_engine_argument_that_cannot_be_handed_on_is_refused(value: Any, says: str) -> None:
    data = pd_data()
    data["engine"] = {"anything": value}
    (complaint,) = complaints_of(data)
    assert complaint.field.startswith("engine.anything")
    assert says in complaint.problem
    str(complaint).encode()


@pytest.mark.parametrize("name", ["", "A=B"])
def test_a_name_that_no_variable_can_have_is_refused(name: str) -> None:
    (complaint,) = complaints_of(pd_data() | {"env": {name: "x"}})
    assert "name of a variable" in complaint.problem


@pytest.mark.parametrize(("field", "value"), [("lease_ttl", 1e308), ("local_buffer_bytes", "2EiB")])
def test_sizes_and_durations_that_nothing_has_are_refused(field: str, value: Any) -> None:
    data = pd_data()
    data.setdefault("pool", {})[field] = value
    (complaint,) = complaints_of(data)
    assert complaint.field == f"pool.{field}"


@pytest.mark.parametrize("override", [".".join("a" * 3000) + "=1", "engine.x=" + "[" * 3000])
def test_an_override_that_nests_without_end_is_refused(tmp_path: Path, override: str) -> None:
    job = tmp_path / "job.toml"
    job.write_text('name = "x"')
    with pytest.raises(SpecError, match="nested too deep"):
        load_job_file(job, [override])
