"""No text that is shown repeats what a job file says under the name of a secret."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.errors import SpecError
from orchestrator.spec.secrets import is_secret, secrets_in, without_secrets
from tests.unit.orchestrator.samples import pd_data, spec_of

SECRET = "s3cr3t-s3cr3t"


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "api_key", "wandb_api_key", "hf_token"]
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)
    assert without_secrets({name: SECRET, "a": [{name: 7}]}) == {name: "(left out)", "a": [{name: "(left out)"}]}


@pytest.mark.parametrize("name", ["TOKEN_FILE", "max_num_batched_tokens", "tokenizer", "key_count", "OMP_NUM_THREADS"])
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name)
    assert without_secrets({name: SECRET}) == {name: SECRET}


@pytest.mark.parametrize(
    "changes",
    [
        {"env": {"HF_TOKEN": [SECRET]}},
        {"env": {"HF_TOKEN": f"{SECRET}\0"}},
        {"env": {"HF_TOKEN": f"{SECRET}\ud800"}},
        {"env": {"": "x", "HF_TOKEN": SECRET}},
        {"roles": {"decode": {"env": {"HF_TOKEN": {"a": SECRET}}}}},
        {"pool": {"master_flags": {"etcd_password": [SECRET]}}},
    ],
)
def test_complaints_leave_them_out(changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as refused:
        spec_of(pd_data(**changes))
    assert SECRET not in str(refused.value)


def test_secrets_to_look_for_elsewhere() -> None:
    table = {"env": {"A_TOKEN": "t" * 20, "B": "b" * 20}, "x_key": {"a": ["k" * 20]}, "c_token": "short"}
    assert set(secrets_in(table)) == {"t" * 20, "k" * 20}
