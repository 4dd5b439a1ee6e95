"""The router's internal port, as far as a coordinator needs it. Blocking; `receivers.py` makes the calls.

The other end is `router/io/admin.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar

import httpx
import msgspec

from connectors.types import Role
from orchestrator.plan.types import RouterPlan
from orchestrator.spec.weights import InFlightMode
from orchestrator.weights.words import Order, ReplicaFacts, RouterFacts
from router.core.finished import AuditOutcome, FinishedRequest
from router.core.fleet import ReplicaView
from router.core.gate import GateState

Answer = TypeVar("Answer")
CALL_S = 10.0
"""Beyond the time that a command gives the router."""
SHOWN = 300
"""Characters of an unexpected answer that an error repeats."""


class RouterCallFailed(Exception):
    """No answer, or none that says whether the command was carried out."""


class RouterRefused(RouterCallFailed):
    """The router has said that it does not do it, or could not within the time."""


@dataclass(frozen=True, kw_only=True)
class RouterTraffic:
    """What passes through a router now."""

    gate: GateState
    sessions: int
    waiting: int
    """Requests that no engine was chosen for yet."""
    admitted: int
    """Requests that engines work on."""
    replicas: tuple[ReplicaView, ...]


@dataclass(frozen=True, kw_only=True)
class _Replica(ReplicaFacts):
    name: str


@dataclass(frozen=True, kw_only=True)
class _State:
    """What of /state a coordinator goes by."""

    gate: GateState
    order: Order
    replicas: tuple[_Replica, ...]


@dataclass(frozen=True, kw_only=True)
class _Drained:
    legs_in_flight: int


@dataclass(frozen=True, kw_only=True)
class _Finished:
    requests: list[FinishedRequest]


class RouterClient:
    """One router's commands. Every method raises `RouterCallFailed` where it does not do what was asked."""

    def __init__(self, router: RouterPlan) -> None:
        """Raises `RouterCallFailed` where the token cannot be read."""
        try:
            token = Path(router.token_file).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise RouterCallFailed(f"the router's token cannot be read: {error}") from error
        self._http = httpx.Client(
            base_url=router.internal_url,
            headers={"authorization": f"Bearer {token}"},
            trust_env=False,
            # Loading certificates costs more than a request; without TLS in the address there is nothing to verify.
            verify=router.internal_url.startswith("https:"),
        )

    def __enter__(self) -> RouterClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._http.close()

    def state(self) -> RouterFacts:
        state = self._state(_State)
        replicas = {
            each.name: ReplicaFacts(instance=each.instance, epoch=each.epoch, draining=each.draining)
            for each in state.replicas
        }
        return RouterFacts(gate=state.gate, replicas=replicas)

    def traffic(self) -> RouterTraffic:
        return self._state(RouterTraffic)

    def newest_order(self) -> Order:
        """Of the newest command that it took: one that is given in its name is not older."""
        return self._state(_State).order

    def replicas(self) -> dict[str, ReplicaView]:
        """By name, with their load."""
        return {view.name: view for view in self.traffic().replicas}

    def finished(self) -> list[FinishedRequest]:
        """Those that were kept for an audit."""
        return self._call("GET", "/finished", None, 0.0, _Finished).requests

    def tell_audited(self, outcomes: Mapping[AuditOutcome, int]) -> None:
        """How many requests had which outcome, for the metrics."""
        self._call("POST", "/audited", {"outcomes": outcomes}, 0.0, object)

    def set_gate(self, gate: GateState, order: Order, timeout_s: float) -> None:
        self._command("/gate", order, timeout_s, gate=gate, timeout_s=timeout_s)

    def handle_in_flight(self, mode: InFlightMode, order: Order, timeout_s: float) -> None:
        self._command("/in_flight", order, timeout_s, mode=mode, timeout_s=timeout_s)

    def drain(self, name: str, order: Order, *, draining: bool, timeout_s: float) -> int:
        """How many legs the replica has left after `timeout_s`."""
        body = {"draining": draining, "timeout_s": timeout_s, **order._asdict()}
        return self._call("POST", f"/replicas/{name}/drain", body, timeout_s, _Drained).legs_in_flight

    def add(self, name: str, role: Role, url: str, order: Order) -> None:
        """It gets no requests before an epoch was published for it."""
        self._command("/replicas", order, 0.0, name=name, role=role, url=url)

    def remove(self, name: str, order: Order) -> None:
        """What still runs on it is lost."""
        self._call("DELETE", f"/replicas/{name}", order._asdict(), 0.0, object)

    def publish(self, epoch: int, version: str, instances: Mapping[str, str], order: Order, *, committed: int) -> None:
        """Tell who holds these weights: instances by replica."""
        replicas = [{"name": name, "instance": instance} for name, instance in instances.items()]
        self._command("/epochs", order, 0.0, epoch=epoch, version=version, committed=committed, replicas=replicas)

    def _command(self, path: str, order: Order, within_s: float, **fields: object) -> None:
        self._call("POST", path, {**fields, **order._asdict()}, within_s, object)

    def _state(self, kind: type[Answer]) -> Answer:
        return self._call("GET", "/state", None, 0.0, kind)

    def _call(
        self, method: Literal["GET", "POST", "DELETE"], path: str, body: object, within_s: float, kind: type[Answer]
    ) -> Answer:
        try:
            reply = self._http.request(method, path, json=body, timeout=within_s + CALL_S)
        except httpx.HTTPError as error:
            raise RouterCallFailed(f"{method} {path}: {str(error) or type(error).__name__}") from error
        if not reply.is_success:
            failure = RouterRefused if reply.is_client_error else RouterCallFailed
            raise failure(f"{method} {path} answered {reply.status_code}: {reply.text[:SHOWN]}")
        try:
            return msgspec.json.decode(reply.content, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            # Another program listens there, or a router of another version.
            raise RouterCallFailed(f"{method} {path}: {error}: {reply.text[:SHOWN]}") from error
