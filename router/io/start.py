"""What every router process does at its start: settings, token, the parts that exchanges share.

`main.py` and `worker.py` begin here.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import importlib.util
import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from router.core.epochs import Salter
from router.core.finished import FinishedRequests
from router.core.gate import Gate
from router.core.retry import RetryBudget
from router.core.rules import FlowRules, FlowTools
from router.io.alarms import Alarms
from router.io.desk import ExchangeDesk
from router.io.exchange import ExchangeTools
from router.io.http1.message import Limits as HttpLimits
from router.io.metrics import Metrics
from router.io.upstream import Upstream
from router.settings import TOKEN_FILE_VARIABLE, RouterSettings

_GC_THRESHOLDS = (50_000, 20, 100)
_KEPT_BYTES = 32 * 1024 * 1024
# The names of mallopt(3) as glibc's malloc.h has them.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


class StartError(Exception):
    """The router can't start; the message says what to mend."""


def load_settings(path: Path) -> RouterSettings:
    try:
        return RouterSettings.model_validate_json(path.read_bytes())
    except OSError as error:
        raise StartError(f"--config {path}: {error.strerror}") from error
    except ValidationError as error:
        mistakes = (f"{'.'.join(map(str, each['loc'])) or 'settings'}: {each['msg']}" for each in error.errors())
        raise StartError(f"--config {path}: {'; '.join(mistakes)}") from error


def load_token(environment: Mapping[str, str]) -> str:
    name = environment.get(TOKEN_FILE_VARIABLE)
    if not name:
        raise StartError(f"{TOKEN_FILE_VARIABLE} must name the file with the internal port's token")
    try:
        token = Path(name).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"{TOKEN_FILE_VARIABLE}={name}: {error}") from error
    if not token:
        raise StartError(f"{TOKEN_FILE_VARIABLE}={name}: the file is empty")
    return token


def exchange_tools(
    settings: RouterSettings,
    desk: ExchangeDesk,
    gate: Gate,
    upstream: Upstream,
    counted: Metrics,
    numbers: Iterator[int],
    token: str,
) -> ExchangeTools:
    """What the exchanges of a process share."""
    loop = asyncio.get_running_loop()
    rules = FlowRules(
        retries=settings.retries,
        retry_backoff_s=settings.retry_backoff_s,
        request_timeout_s=settings.request_timeout_s,
        leg_timeout_s=settings.leg_timeout_s,
        handoff_lifetime_s=settings.handoff_lease_s - settings.handoff_margin_s,
        session_fields=settings.session_fields,
        readmit_streams=settings.readmit_streams,
        max_samples=settings.max_samples,
    )
    flow = FlowTools(
        gate=gate,
        salter=Salter(token.encode()),
        budget=RetryBudget.full(per_request=settings.retry_budget, most=settings.retry_burst),
        rules=rules,
    )
    return ExchangeTools(
        desk=desk,
        upstream=upstream,
        metrics=counted,
        flow=flow,
        loop=loop,
        alarms=Alarms(loop),
        numbers=numbers,
        tell_bytes_every_s=settings.silence_limit_s / 8,
    )


def kept_for_audit(settings: RouterSettings) -> FinishedRequests | None:
    share = settings.audit_share
    return FinishedRequests(share=share, most=settings.audit_kept) if share > 0 else None


def http_limits(settings: RouterSettings) -> HttpLimits:
    return HttpLimits(
        max_body_bytes=settings.max_body_bytes,
        max_header_bytes=settings.max_header_bytes,
        header_timeout_s=settings.header_timeout_s,
        body_timeout_s=settings.body_timeout_s,
        idle_timeout_s=settings.idle_timeout_s,
    )


def tune_memory() -> None:
    """Settle in for a long life of short requests: call it when everything is imported.

    What is there by now stays, so the collector need not look at it again; requests leave no cycles behind, so it need
    not look often either (with 100,000 sessions one full look takes a tenth of a second). And the C library
    keeps what large bodies free instead of giving it back to the kernel and asking for it again with the next one.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TOP_PAD, _KEPT_BYTES // 4)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)


def raise_open_files() -> None:
    """Use as many files as the system lets this process have. Each connection is one, and a process starts with 1024 on
    most machines."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed: the same behaviour for less CPU."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return factory
