"""A streamed reply on its way through: line by line, changed only where the P engine knows better.

`flow.py` makes one `StreamMerge` per relayed leg; `io/exchange.py` feeds it what arrives and writes what comes
out. Whole lines leave at once; of a line in the making only the beginning is kept.
"""

from __future__ import annotations

import msgspec

from router.core.split import PrefillResult, merge_reply, read_prefill_reply

_DATA = b"data:"


class _Error(msgspec.Struct):
    code: int | str | None = None


class _ErrorEvent(msgspec.Struct):
    error: _Error


_ERROR_EVENT: msgspec.json.Decoder[_ErrorEvent] = msgspec.json.Decoder(_ErrorEvent)


class StreamMerge:
    """Feed bytes in, take bytes out."""

    def __init__(self, prefill: PrefillResult | None) -> None:
        self._prefill = prefill
        self._rest = b""
        self.engine_failed = False
        """An event told that the engine failed, after 200."""

    def feed(self, data: bytes) -> bytes:
        """The whole lines that are complete by now."""
        if self._rest:
            data = self._rest + data
        end = data.rfind(b"\n") + 1
        self._rest = data[end:]
        lines = data[:end]
        if b'"error"' in lines:
            self.engine_failed = self.engine_failed or failed_event(lines)
        if self._prefill is None or b'"cached_tokens"' not in lines:
            return lines
        return b"".join(self._merge(line) for line in lines.splitlines(keepends=True))

    def flush(self) -> bytes:
        """What is left of an unfinished last line."""
        rest, self._rest = self._rest, b""
        return rest

    def _merge(self, line: bytes) -> bytes:
        if not line.startswith(_DATA) or b'"cached_tokens"' not in line:
            return line
        payload = line[len(_DATA) :]
        text = payload.strip()
        return line.replace(text, merge_reply(text, self._prefill), 1)


def failed_event(lines: bytes) -> bool:
    """Does one of these lines say that the engine failed? An error that names a 4xx is the client's."""
    for line in lines.splitlines():
        if not line.startswith(_DATA) or b'"error"' not in line:
            continue
        text = line[len(_DATA) :].strip()
        result = read_prefill_reply(text)
        if result is not None and result.failed:
            return True
        try:
            code = _ERROR_EVENT.decode(text).error.code
        except (msgspec.MsgspecError, RecursionError):
            continue
        if not (isinstance(code, int) and 400 <= code < 500):
            return True
    return False
