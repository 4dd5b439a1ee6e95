"""Commands to the ranks of an engine and what each rank says of one, as data for the wire. Standard library only.

`vllm_plugin/weight_routes.py` sends commands through vLLM's collective call and judges the reports; `rank.py` obeys.
A rank never raises: after one rank of several did, vLLM hands out every later answer shifted by one. So that a shifted
answer is noticed, each call has a name that its reports repeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Phase = Literal["idle", "prefetching", "prefetched"]
CommandName = Literal["prefetch", "load", "state", "reset", "serve"]


@dataclass(frozen=True, kw_only=True)
class WeightCommand:
    """What one call asks of every rank."""

    name: CommandName
    call: str
    """Of this call; repeated in its reports."""
    order: tuple[int, int, int] | None = None
    """(update, attempt, step). None on vLLM's own routes, which have no such thing."""
    source: dict[str, Any] = field(default_factory=dict)
    """A SourceInfo."""
    mode: str | None = None
    """None: as the engine is set."""
    check_finite: bool = False
    timeout_s: float = 60.0
    """Bound of each step that waits for the source."""
    limit_s: float = 600.0
    """Bound of the whole load, but for one step of `timeout_s`."""

    def to_wire(self) -> dict[str, Any]:
        wire = asdict(self)
        wire["order"] = None if self.order is None else list(self.order)
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> WeightCommand:
        """Raises TypeError for a field that is none."""
        order = wire.get("order")
        return cls(**{**wire, "order": None if order is None else tuple(order)})


@dataclass(kw_only=True)
class LoadResult:
    """How the last load of a rank ended, as all ranks agreed."""

    ok: bool
    version: str
    error: str = ""
    names: list[str] = field(default_factory=list)
    """Tensors or parameters that the error is about."""
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class RankReport:
    """What one rank says after a call."""

    call: str
    rank: int
    ranks: int
    ok: bool
    """Whether the call did what it asks, on all ranks where it needs them all."""
    error: str = ""
    version: str | None = None
    """Of the weights in the parameters; None where they are those that the engine started with."""
    torn: str = ""
    """Why the parameters are no version's; empty where they are whole."""
    lost: str = ""
    """Why this life of the engine cannot be trusted any more."""
    phase: Phase = "idle"
    prefetched: str | None = None
    """Version of a copy in host memory that is ready to be loaded."""
    order: list[int] | None = None
    """Of the last command that was obeyed."""
    served: dict[str, Any] | None = None
    """SourceInfo under which this engine's weights can be read."""
    last_load: LoadResult | None = None

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> RankReport:
        """Raises TypeError where it is no report."""
        last = wire.get("last_load")
        return cls(**{**wire, "last_load": None if last is None else LoadResult(**last)})


@dataclass(frozen=True, kw_only=True)
class EngineVerdict:
    """What all reports of one call say together."""

    ok: bool
    error: str
    torn: str
    lost: str
    reports: tuple[RankReport, ...]


def judge(call: str, answers: Sequence[Any], ranks: int) -> EngineVerdict:
    """Of the answers to a call: whether they answer it at all, come from each of so many ranks once, and agree."""
    reports: list[RankReport] = []
    lost = ""
    for answer in answers:
        try:
            reports.append(RankReport.from_wire(answer))
        except (TypeError, AttributeError, ValueError):
            lost = "a rank gave an answer that is no report: answers are shifted"
    if not lost and any(report.call != call for report in reports):
        lost = "a rank answered an earlier call: answers are shifted"
    if not lost and sorted(report.rank for report in reports) != list(range(ranks)):
        lost = "the ranks that answered are not each rank once"
    if not lost and len({report.version for report in reports}) > 1:
        lost = "the ranks hold different versions"
    lost = lost or next((report.lost for report in reports if report.lost), "")
    torn = next((report.torn for report in reports if report.torn), "")
    error = lost or next((report.error or "no reason given" for report in reports if not report.ok), "")
    return EngineVerdict(ok=not error, error=error, torn=torn, lost=lost, reports=tuple(reports))


def lost_verdict(why: str) -> EngineVerdict:
    """Where no answers came."""
    return EngineVerdict(ok=False, error=why, torn="", lost=why, reports=())
