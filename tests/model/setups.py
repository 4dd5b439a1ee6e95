"""Which setups are explored, and where the product of all is bounded."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import get_args

from orchestrator.spec.weights import InFlightMode, Strategy
from tests.model.fleet import FAULTS, Setup

BOUNDS = """\
2 prefill and 2 decode engines; barrier and rolling; readmit, wait, abort and keep. Explored without end, but for:
- no fault: 2 sessions of 2 turns, 2 updates; and 2 sessions of 1 turn, 1 update with all that is on its way (fine)
- coordinator, router, store, load, cancel, client: 2 sessions of 1 turn, 1 update
- engine, source, and restart behind the port: 1 session of 1 turn, 1 update
- source: readmit only, since the joins that it is about do not look at the in-flight mode
- rolling does not look at the in-flight mode: those beside readmit without a fault only, 1 session of 1 turn, 1 update
- updates are asked for, and time-outs of the coordinator come, when nothing is on its way between it and the others"""


def every_setup() -> list[Setup]:
    setups = []
    for strategy, mode, fault in product(get_args(Strategy), get_args(InFlightMode), FAULTS):
        setup = Setup(strategy=strategy, in_flight=mode, fault=fault)
        if mode != "readmit" and (strategy == "rolling" or fault == "source"):
            if fault == "none":
                setups.append(replace(setup, turns=(1, 0), updates=1))
        elif fault == "none":
            setups += [setup, replace(setup, turns=(1, 1), updates=1, is_fine=True)]
        else:
            turns = (1, 0) if fault in ("engine", "source", "reborn") else (1, 1)
            setups.append(replace(setup, turns=turns, updates=1))
    return setups


def short_setups() -> list[Setup]:
    """A few, for every day."""
    quiet = [
        replace(each, turns=(1, 0), updates=1) for each in every_setup() if each.fault == "none" and not each.is_fine
    ]
    failing = [
        Setup(strategy=strategy, in_flight="readmit", fault=fault, turns=(1, 0), updates=1)
        for strategy, fault in product(get_args(Strategy), ("load", "cancel"))
    ]
    return [*quiet, *failing]
