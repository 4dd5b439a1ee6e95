"""Audits jobs unasked: the newest request that a job's router has kept, as often as `[audit] every` says.

`headrace serve` runs it beside `supervision.py`. What disagrees is said in the log, and every outcome is counted by the
job's router (`headrace_router_audits_total`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.errors import HeadraceError
from orchestrator.plan.types import JobPlan
from orchestrator.store.jobs import JobStore
from orchestrator.weights.audit import Audited

LOOK_EVERY_S = 1.0
REMEMBERED = 4096
"""Requests that are not audited again; more than a router keeps."""

_log = logging.getLogger(__name__)


@dataclass
class _Rounds:
    """Of one run of a job."""

    run_id: str
    due: float
    audited: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED))


class AuditRounds:
    """Of all jobs that serve, one after the other."""

    def __init__(self, store: JobStore, audit: Callable[[JobPlan, int, frozenset[str]], tuple[Audited, ...]]) -> None:
        """`audit`: as `weights/audit.py` has `audit_kept`."""
        self._store = store
        self._audit = audit
        self.rounds: dict[str, _Rounds] = {}
        """Of jobs that serve, by name."""

    def keep(self, stopping: threading.Event) -> None:
        while not stopping.wait(LOOK_EVERY_S):
            try:
                self.look(time.monotonic())
            except HeadraceError as error:
                _log.warning("no audits now: %s", error)

    def look(self, now: float) -> None:
        """Audit the jobs whose turn it is."""
        names = self._store.serving_names()
        self.rounds = {name: rounds for name, rounds in self.rounds.items() if name in names}
        for name in names:
            try:
                self._look_at(name, now)
            except HeadraceError as error:
                _log.warning("%s: not audited: %s", name, error)
            except Exception:
                _log.exception("%s: its audit failed in a way that was not foreseen", name)

    def _look_at(self, name: str, now: float) -> None:
        job = self._store.get(name)
        every_s = job.plan.audit.every_s
        if every_s is None:
            return
        rounds = self.rounds.get(name)
        if rounds is None or rounds.run_id != job.run_id:
            rounds = self.rounds[name] = _Rounds(run_id=job.run_id, due=now + every_s)
        if now < rounds.due:
            return
        rounds.due = now + every_s
        for found in self._audit(job.plan, 1, frozenset(rounds.audited)):
            rounds.audited.append(found.id)
            keys = f"; keys {', '.join(found.keys)}" if found.keys else ""
            _log.log(logging.ERROR if found.outcome == "disagrees" else logging.INFO, "%s: %s%s", name, found, keys)
