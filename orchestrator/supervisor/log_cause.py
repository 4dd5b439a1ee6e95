"""The line of a dead process's log that says why it died, and the command that mends it where that is known."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

_LIBRARY = re.compile(r"error while loading shared libraries: (\S+?):")
_EXCEPTION = re.compile(r"(?:^|[\s)])([A-Za-z_][\w.]*(?:Error|Exception|Refused|Missing))(?:: ?(.+)|$)")
_PLAIN = re.compile(r"(?:^[EF](?:\d{4}|\d{8}) |\b(?:FATAL|fatal|error:|Error:|ERROR)(?!\w)).*")
"""The first is glog's: severity, date, then time, thread, file and line."""
_FENCE = re.compile(r"(?:ModuleNotFound|Import|Attribute)Error: .*\bconnectors\b")
"""The module of every engine's --middleware is `connectors.vllm_plugin.fence`."""
_WRAPPER = re.compile(r"RuntimeError: Engine core initialization failed")
"""vLLM's API server repeats a dead engine core in these words; the cause stands above them."""


def missing_library(lines: Sequence[str]) -> str | None:
    """Name of the shared library that the loader did not find."""
    found = [match[1] for line in lines if (match := _LIBRARY.search(line))]
    return found[-1] if found else None


def fence_not_loaded(lines: Sequence[str]) -> bool:
    """Whether an engine ended because its interpreter cannot import the fence."""
    return any(_FENCE.search(line) for line in lines)


def likely_cause(lines: Sequence[str]) -> str:
    """The last line that names an error, wrappers apart; the last line of all where none does."""
    library = next((line for line in reversed(lines) if _LIBRARY.search(line)), None)
    if library is not None:
        return library.strip()
    exceptions = [match for line in lines if not _WRAPPER.search(line) and (match := _EXCEPTION.search(line))]
    if exceptions:
        kind, words = exceptions[-1].groups()
        return f"{kind}: {words.strip()}" if words else kind
    plain = [match[0] for line in lines if (match := _PLAIN.search(line))]
    if plain:
        return plain[-1].strip()
    return next((line.strip() for line in reversed(lines) if line.strip()), "the log is empty")


def end_cause(exit_code: int | None, lines: Sequence[str]) -> str:
    """Why a process ended. One that was killed leaves no word of it in its log, whatever stands there."""
    if exit_code in (-signal.SIGKILL, -signal.SIGTERM):
        return f"ended by signal {-exit_code}"
    code = "" if exit_code is None else f" with exit code {exit_code}"
    return f"ended{code}; its log says: {likely_cause(lines)}"
