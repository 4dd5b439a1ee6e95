"""Asks whether a started unit is ready. The orchestrator asks again until it is, or until the unit's time is up.

The probes are defined in `deploy.unit`; the members come from a backend's `poll`. A probe never raises for what
it meets on the way: that is its answer, in words fit for "waiting for ...".
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from deploy.local.sockets import listens
from deploy.unit import HttpProbe, ListenProbe, MetricProbe, Probe

_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """One answer."""

    ready: bool
    detail: str
    """What was seen, or what is still awaited."""


def check(probe: Probe, members: Sequence[int]) -> ProbeResult:
    """Ask once; takes some seconds at most. `members` are the pids of the unit's living processes."""
    match probe:
        case ListenProbe():
            return _check_listen(probe, members)
        case HttpProbe():
            return _check_http(probe)
        case MetricProbe():
            return _check_metric(probe)


def metric_sum(text: str, metric: str) -> float | None:
    """The sum of all samples called `metric` in a Prometheus text, or None if there is none.

    Raises:
        ValueError: `text` is no Prometheus text.
    """
    values = []
    for family in text_string_to_metric_families(text):
        # The parser gives every counter the suffix, also one that was exposed without it.
        names = {metric, f"{metric}_total"} if family.type == "counter" else {metric}
        values += [sample.value for sample in family.samples if sample.name in names]
    return sum(values) if values else None


def _check_listen(probe: ListenProbe, members: Sequence[int]) -> ProbeResult:
    if listens(probe.port, members):
        return ProbeResult(ready=True, detail=f"port {probe.port} listening")
    return ProbeResult(ready=False, detail=f"port {probe.port} not yet listening")


def _check_http(probe: HttpProbe) -> ProbeResult:
    headers = {}
    if probe.token_file is not None:
        try:
            headers["authorization"] = f"Bearer {probe.token_file.read_text(encoding='ascii').strip()}"
        except (OSError, ValueError) as error:
            return ProbeResult(ready=False, detail=_said(probe.url, f"the token to send cannot be read: {error}"))
    answer = _get(probe.url, headers)
    if isinstance(answer, _NoAnswer):
        return ProbeResult(ready=False, detail=_said(probe.url, answer.reason))
    return ProbeResult(ready=answer.status == httpx.codes.OK, detail=_said(probe.url, str(answer.status)))


def _check_metric(probe: MetricProbe) -> ProbeResult:
    answer = _get(probe.url, {})
    if isinstance(answer, _NoAnswer):
        return ProbeResult(ready=False, detail=_said(probe.url, answer.reason))
    if answer.status != httpx.codes.OK:
        return ProbeResult(ready=False, detail=_said(probe.url, str(answer.status)))
    try:
        value = metric_sum(answer.text, probe.metric)
    except ValueError as error:
        return ProbeResult(ready=False, detail=_said(probe.url, f"no Prometheus text ({error})"))
    if value is None:
        return ProbeResult(ready=False, detail=f"{probe.metric} not yet reported")
    return ProbeResult(
        ready=value >= probe.at_least, detail=f"{probe.metric} {_number(value)} of {_number(probe.at_least)}"
    )


@dataclass(frozen=True, kw_only=True)
class _Answer:
    status: int
    text: str


@dataclass(frozen=True, kw_only=True)
class _NoAnswer:
    reason: str


def _get(url: str, headers: Mapping[str, str]) -> _Answer | _NoAnswer:
    # The units are ours: a proxy named in the environment has no part in this. Without TLS in the address there is
    # nothing to verify, and loading the certificates would cost more than the request.
    encrypted = url.startswith("https:")
    try:
        with (
            httpx.Client(timeout=_TIMEOUT_S, trust_env=False, verify=encrypted) as client,
            client.stream("GET", url, headers=headers) as response,
        ):
            body = _read_in_time(response)
            return _Answer(status=response.status_code, text=body.decode(errors="replace"))
    except httpx.TimeoutException:
        return _NoAnswer(reason=f"no answer within {_TIMEOUT_S:g} s")
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, ValueError, OSError) as error:
        # ValueError: a name that cannot be encoded as a host, a header or body that is none.
        return _NoAnswer(reason=_cause(error))


def _read_in_time(response: httpx.Response) -> bytes:
    # httpx limits the wait for each piece; a server that drips would hold the prober for ever.
    ends = time.monotonic() + _TIMEOUT_S
    pieces = []
    for piece in response.iter_bytes():
        pieces.append(piece)
        if time.monotonic() > ends:
            raise httpx.ReadTimeout("the body took too long")
    return b"".join(pieces)


def _cause(error: BaseException) -> str:
    """The operating system's word for what went wrong, if it is behind the error."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.errno and link.errno > 0:
            return os.strerror(link.errno).lower()
        link = link.__cause__ or link.__context__
    return str(error) or type(error).__name__


def _said(url: str, what: str) -> str:
    try:
        path = httpx.URL(url).path
    except (httpx.InvalidURL, ValueError):
        path = url
    return f"GET {path}: {what}"


def _number(value: float) -> str:
    return f"{value:.15g}"
