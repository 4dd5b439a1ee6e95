"""What an engine holds and says after loads, beside engines that were started on the same weights. Printed, no goal is
about it.

`bench_weights.py` runs it as one of its parts. Two sets of weights; each load brings the one that is not there. Outputs
of two engines may part at near-ties although all parameters are equal, bit for bit: kernels are chosen at the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tests.benchmarks.figures import Figure
from tests.benchmarks.weights.parts import Scale, engine_on, say, trainer_of, volume
from tests.benchmarks.weights.talker import Talker

SEEDS = (1, 2)
SETTINGS = {"mode": "gpu_fetch", "keep_copy": True}

Outputs = Sequence[Sequence[tuple[int, float]]]
"""Per prompt (token, log-probability)."""


@dataclass(frozen=True)
class Seen:
    """Of an engine at one time."""

    checksums: Mapping[str, int]
    """By parameter or buffer."""
    outputs: Outputs


def measure_outputs(scale: Scale) -> list[Figure]:
    loads = [("gpu_fetch", transport) for transport in scale.transports] + [("cpu_prefetch", "nixl")]
    with ExitStack() as stack:
        trainer = stack.enter_context(trainer_of(scale))
        with engine_on(scale, _publish(trainer, SEEDS[0], "path", "first"), SETTINGS) as engine:
            first = _look(engine)
        engine = stack.enter_context(engine_on(scale, _publish(trainer, SEEDS[1], "path", "second"), SETTINGS))
        started = (first, _look(engine))
        say(f"  the two sets of weights: {_difference(*started)}")
        master = stack.enter_context(volume(scale))
        for number, (mode, transport) in enumerate(loads):
            seed = SEEDS[number % 2]
            source = _publish(trainer, seed, transport, f"load-{number}", master)
            engine.ask("command", name="load", source=source, mode=mode)
            trainer.ask("done", readers=1)
            difference = _difference(_look(engine), started[number % 2])
            say(f"  {mode} {transport}, beside an engine started on those weights: {difference}")
    return []


def _publish(trainer: Talker, seed: int, transport: str, version: str, master: str = "") -> Mapping[str, Any]:
    trainer.ask("reseed", seed=seed)
    source: Mapping[str, Any] = trainer.ask("publish", transport=transport, version=version, master=master)
    return source


def _look(engine: Talker) -> Seen:
    return Seen(checksums=engine.ask("checksums"), outputs=engine.ask("outputs"))


def _difference(ours: Seen, theirs: Seen) -> str:
    assert ours.checksums.keys() == theirs.checksums.keys()
    changed = sum(ours.checksums[name] != theirs.checksums[name] for name in ours.checksums)
    pairs = list(zip(chain.from_iterable(ours.outputs), chain.from_iterable(theirs.outputs), strict=True))
    others = sum(here != there for (here, _), (there, _) in pairs)
    furthest = max(abs(here - there) for (_, here), (_, there) in pairs)
    return (
        f"{changed} of {len(ours.checksums)} parameters and buffers differ; {others} of {len(pairs)} tokens, "
        f"log-probabilities by {furthest:.3g} at most"
    )
