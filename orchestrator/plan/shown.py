"""A plan as people may see it. `headrace render` and the control API show no other."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.plan.types import JobPlan
from orchestrator.spec.difference import asked_for
from orchestrator.spec.job import JobSpec
from orchestrator.spec.secrets import blank, secrets_in, without_secrets


def shown_plan(plan: JobPlan) -> JobPlan:
    """Without the secrets of its job file, wherever they may have been written."""
    asked = asked_for(plan.spec)
    secrets = frozenset(secrets_in(asked))

    def shown(text: str) -> str:
        return blank(text, secrets)

    return replace(
        plan,
        spec=JobSpec.model_validate(without_secrets(asked)),
        units=tuple(
            replace(
                unit,
                argv=tuple(map(shown, unit.argv)),
                env={name: shown(value) for name, value in without_secrets(unit.env).items()},
            )
            for unit in plan.units
        ),
        files=tuple(replace(file, text=shown(file.text)) for file in plan.files),
        findings=tuple(replace(found, problem=shown(found.problem), mend=shown(found.mend)) for found in plan.findings),
    )
