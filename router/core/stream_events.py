"""The parts of a stream's events that `stream.py` reads."""

from __future__ import annotations

import msgspec


class _Error(msgspec.Struct):
    code: int | str | None = None


class ErrorEvent(msgspec.Struct):
    error: _Error


class _Choice(msgspec.Struct):
    token_ids: list[msgspec.Raw] | None = None


class Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: msgspec.Raw = msgspec.Raw()


ERROR_EVENT: msgspec.json.Decoder[ErrorEvent] = msgspec.json.Decoder(ErrorEvent)
EVENT: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
