"""The bodies of the legs, made by the table in `fields.py`, and the requests that can't be split.

`flow.py` asks `check_split` or `check_single` before a request's first leg and sends the bodies. A body is one copy of
the client's fields with a few changed; values that stay are the client's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from connectors.handoff import PARAMS_FIELD
from router.core.errors import RequestRefused
from router.core.split.body import SALT_FIELD, SAMPLING_FIELD
from router.core.split.client_body import ClientBody
from router.core.split.fields import FIELDS, SAMPLING_FIELDS
from router.core.split.rules import FieldRule, Refusal, Route
from router.core.split.values import Body, is_null

_Refusals = Mapping[str, Refusal]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Changes:
    """One leg's column of a table: only the rows that change something."""

    dropped: frozenset[str]
    replaced: Body
    """Where they were sent."""
    put: Body

    def applied(self, fields: Body) -> Body:
        """A changed copy."""
        made = fields.copy()
        for name in self.dropped.intersection(fields):
            del made[name]
        for name, value in self.replaced.items():
            if name in made:
                made[name] = value
        made.update(self.put)
        return made


def _changes(table: Mapping[str, FieldRule], leg: Literal["prefill", "decode"]) -> _Changes:
    column = {name: rule.prefill if leg == "prefill" else rule.decode for name, rule in table.items()}
    values = {name: msgspec.Raw(cell.value) for name, cell in column.items()}
    return _Changes(
        dropped=frozenset(name for name, cell in column.items() if cell.action == "drop"),
        replaced={name: values[name] for name, cell in column.items() if cell.action == "set_if_sent"},
        put={name: values[name] for name, cell in column.items() if cell.action == "set"},
    )


def _refusals(table: Mapping[str, FieldRule], *, everywhere: bool = False) -> _Refusals:
    """The table's refusals; `everywhere`: only those that hold without a handoff."""
    return {
        name: rule.refusal
        for name, rule in table.items()
        if rule.refusal is not None and (rule.refused_everywhere or not everywhere)
    }


_PREFILL: dict[Route, _Changes] = {route: _changes(table, "prefill") for route, table in FIELDS.items()}
_DECODE: dict[Route, _Changes] = {route: _changes(table, "decode") for route, table in FIELDS.items()}
_REFUSALS: dict[Route, _Refusals] = {route: _refusals(table) for route, table in FIELDS.items()}
_REFUSALS_EVERYWHERE: dict[Route, _Refusals] = {
    route: _refusals(table, everywhere=True) for route, table in FIELDS.items()
}
_SAMPLING_PREFILL = _changes(SAMPLING_FIELDS, "prefill")
_SAMPLING_DECODE = _changes(SAMPLING_FIELDS, "decode")
_SAMPLING_REFUSALS = _refusals(SAMPLING_FIELDS)
_SAMPLING_REFUSALS_EVERYWHERE = _refusals(SAMPLING_FIELDS, everywhere=True)


def check_split(body: ClientBody) -> None:
    """Refuse what one handoff can't serve, naming the field."""
    _check(body, _REFUSALS[body.route], _SAMPLING_REFUSALS)


def check_single(body: ClientBody) -> None:
    """Refuse what no engine may be sent, naming the field."""
    _check(body, _REFUSALS_EVERYWHERE[body.route], _SAMPLING_REFUSALS_EVERYWHERE)


def single_body(body: ClientBody, *, salt: str) -> bytes:
    """The body for an engine that does both: the client's, without the router's own fields."""
    return _encoded(body.fields.copy(), salt)


def prefill_body(body: ClientBody, *, salt: str) -> bytes:
    """The P leg: one token of one sample, not streamed, its KV kept for another engine."""
    return _encoded(_changed(body, _PREFILL[body.route], _SAMPLING_PREFILL), salt)


def decode_body(body: ClientBody, handoff: bytes | None, *, salt: str) -> bytes:
    """The D leg: the client's body and the whole handoff, byte for byte; without one the engine runs the prompt."""
    fields = _changed(body, _DECODE[body.route], _SAMPLING_DECODE)
    if handoff is not None:
        fields[PARAMS_FIELD] = msgspec.Raw(handoff)
    return _encoded(fields, salt)


def _changed(body: ClientBody, changes: _Changes, sampling_changes: _Changes) -> Body:
    """A copy of the client's fields; the generate route's sampling fields stand one level deeper."""
    fields = changes.applied(body.fields)
    if body.route == "generate" and body.sampling is not None:
        fields[SAMPLING_FIELD] = msgspec.Raw(msgspec.json.encode(sampling_changes.applied(body.sampling)))
    return fields


def _encoded(fields: Body, salt: str) -> bytes:
    """The salt stands in place of the client's own."""
    fields[SALT_FIELD] = msgspec.Raw(msgspec.json.encode(salt))
    return msgspec.json.encode(fields)


def _check(body: ClientBody, refusals: _Refusals, sampling_refusals: _Refusals) -> None:
    _refuse(body, body.fields, refusals)
    if body.route == "generate" and body.sampling is not None:
        _refuse(body, body.sampling, sampling_refusals)


def _refuse(body: ClientBody, fields: Body, refusals: _Refusals) -> None:
    for name in fields:
        if name in refusals and not is_null(fields[name]):
            message = refusals[name](body)
            if message is not None:
                raise RequestRefused(message, param=name)
