"""The router's settings file: written by the plan, read by `router/main.py`.

Every default of the data plane lives here, once.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

EngineRole = Literal["prefill", "decode", "colocated"]

TOKEN_FILE_VARIABLE = "HEADRACE_TOKEN_FILE"
"""Environment variable that names the file with the internal port's bearer token."""

_ENGINE_URL = re.compile(r"http://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]+))?")
_MAX_PORT = 65535


def check_engine_url(url: str) -> str:
    """An engine's address, to which paths are appended as they are; ValueError where it is anything else."""
    match = _ENGINE_URL.fullmatch(url)
    if match is None or not 0 < int(match["port"] or 80) <= _MAX_PORT:
        raise ValueError(f"must be http://HOST or http://HOST:PORT and nothing more, but is {url!r}")
    return url


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineEndpoint(_Model):
    """One replica as the router reaches it."""

    name: str
    """The replica's name in the plan, e.g. "decode-1"."""
    role: EngineRole
    url: Annotated[str, AfterValidator(check_engine_url)]
    """Base URL without a path, e.g. "http://127.0.0.1:8200"."""


class MoveRules(_Model):
    """When a session leaves the replica that it is pinned to, although that one has room."""

    factor: float = Field(2.0, ge=1)
    """Waiting must cost this many times what moving costs."""
    min_gain_s: float = Field(1.0, ge=0)
    """And so much more in any case."""
    rest_s: float = Field(30.0, ge=0)
    """A session that has moved stays for this long."""


class StickyLeastLoaded(_Model):
    """A new session goes to the replica with the fewest active sessions and stays until waiting costs more than
    moving."""

    type: Literal["sticky_least_loaded"] = "sticky_least_loaded"
    session_idle_s: float = Field(600.0, gt=0)
    """A session without an open request is forgotten after this many seconds."""
    move: MoveRules | None = MoveRules()
    """None: it never moves while its replica has room."""


class RoundRobin(_Model):
    """Replicas in turn, whatever the session."""

    type: Literal["round_robin"] = "round_robin"


class LeastLoaded(_Model):
    """The replica with the fewest requests, whatever the session."""

    type: Literal["least_loaded"] = "least_loaded"


class ConsistentHash(_Model):
    """The replica that the hash of the session (of the request, without one) names."""

    type: Literal["consistent_hash"] = "consistent_hash"


class PowerOfTwo(_Model):
    """The less loaded of two replicas drawn at random."""

    type: Literal["power_of_two"] = "power_of_two"


PolicySettings = Annotated[
    StickyLeastLoaded | RoundRobin | LeastLoaded | ConsistentHash | PowerOfTwo, Field(discriminator="type")
]


class RouterSettings(_Model):
    """All that a router process needs to know. Host names and ports come from the plan."""

    job: str
    host: str
    port: int
    """Public port: OpenAI routes, /health, /ready, /metrics, /finish_session."""
    internal_host: str
    internal_port: int
    """Control port: gate, epochs, in-flight requests, replicas, state. Bearer token from the file named by
    HEADRACE_TOKEN_FILE."""
    engines: tuple[EngineEndpoint, ...]
    policy: PolicySettings = StickyLeastLoaded()
    session_headers: tuple[str, ...] = ("x-session-id",)
    """Request headers that may carry the session id; the first one present counts."""
    session_fields: tuple[str, ...] = ("session_id",)
    """Top-level body fields looked at when no header is present. Owned by the router: not sent to engines."""
    handoff_lease_s: float = Field(gt=0)
    """How long a prefill engine keeps the KV of a handoff (NIXL's kv_lease_duration of the composed chain)."""
    handoff_margin_s: float = Field(2.0, ge=0)
    """A handoff older than lease - margin is never sent: a fresh prefill leg is run (field case A39). Connecting counts
    towards that age; the margin covers the way of the bytes and the engine's own start on them."""
    retries: int = Field(2, ge=0)
    """Further attempts after the first, only before the client has seen a byte."""
    retry_backoff_s: float = Field(0.05, ge=0)
    """Pause before the first retry of a request; each further one waits twice as long."""
    retry_budget: float = Field(0.2, ge=0)
    """Retries allowed per request served, saved up to `retry_burst`: a fleet that fails everything is not asked
    everything twice."""
    retry_burst: int = Field(50, ge=1)
    request_timeout_s: float = Field(7200.0, gt=0)
    """How long a whole request may take: all its legs and attempts, streaming included. Then the client gets a 504."""
    leg_timeout_s: float | None = Field(None, gt=0)
    """How long an engine may take to the first byte of a leg's reply (the whole reply, where it does not stream); then
    the leg is ended and run elsewhere. It has to cover the engine's queue and, without streaming, all that is
    generated. None: as long as the request may take."""
    connect_timeout_s: float = Field(4.0, gt=0)
    """How long a connection to an engine may take. Together with the margin it has to fit into the lease: else an
    engine that can't be reached would look like a handoff that expired, and stay in use."""
    question_timeout_s: float = Field(10.0, gt=0)
    """How long an engine may take to answer what generates nothing (models, tokenizing); then the next one is asked."""
    keepalive_s: float = Field(4.0, gt=0)
    """Idle upstream connections are dropped after this."""
    engine_keepalive_s: float = Field(75.0, gt=0)
    """The engines' own keep-alive, as they are started. The router's must be shorter, so that no request is sent on a
    connection that its engine is about to close (field case A16)."""
    max_requests: int | None = Field(None, ge=1)
    """Requests at engines at a time, all replicas together; None: any number. Further ones wait in line."""
    max_legs_per_replica: int | None = Field(None, ge=1)
    """Legs in flight that one replica takes; None: any number."""
    max_waiting: int = Field(8192, ge=0)
    """Length of the line in which requests wait while the gate is closed or no replica has room."""
    max_wait_s: float = Field(600.0, gt=0)
    """How long a request may wait in line; then it gets 503 with Retry-After."""
    skip_prefill_below_tokens: int = Field(0, ge=0)
    """A follow-up whose new part is estimated to be shorter goes straight to the decode replica that has the rest; 0:
    never."""
    readmit_streams: bool = False
    """Keep the tokens that streams deliver, so that a stream whose leg is ended for an update goes on under the next
    weights. Costs a few microseconds per token; without it such a stream ends with an error event (requests that have
    not begun to stream are run again in any case)."""
    max_samples: int = Field(128, ge=1)
    """Samples times prompts that one request may ask for."""
    max_body_bytes: int = Field(16 * 1024 * 1024, gt=0)
    """2.4 million token ids, or 12 MB of images. Nobody else is served while a body is read and split, about 1 ms per
    MiB at each of three moments."""
    max_header_bytes: int = Field(64 * 1024, gt=0)
    header_timeout_s: float = Field(30.0, gt=0)
    """From a request's first byte to the end of its head."""
    body_timeout_s: float = Field(60.0, gt=0)
    """A body of which nothing arrives for so long is given up."""
    idle_timeout_s: float = Field(600.0, gt=0)
    """Client connections without a request are closed after this, as are those whose client takes nothing of a reply,
    for which an engine waits."""
    audit_share: float = Field(0.0, ge=0, le=1)
    """Which part of the requests that ask for token ids and log-probabilities is kept for an audit once they are over;
    0: none."""
    audit_kept: int = Field(16, ge=1, le=1024)
    """So many of them in each worker, the newest."""
    session_journal: str | None = None
    """File in which pins outlive the router; None: a restart forgets them."""
    workers: int = Field(1, ge=1, le=64)
    """Processes that serve the public port."""
    worker_timeout_s: float = Field(30.0, gt=0)
    """A worker that lets a command wait for so long hangs: it is ended and replaced."""
    shutdown_grace_s: float = Field(10.0, ge=0)
    """On SIGTERM open requests may finish for this long."""
    probe_interval_s: float = Field(1.0, gt=0)
    """Pause between two health probes of a replica."""
    probe_timeout_s: float = Field(10.0, gt=0)
    """How long an engine may take to answer a probe; then the next one asks."""
    probe_failures: int = Field(3, ge=1)
    """Refused probes in a row that take a replica out."""
    silence_limit_s: float = Field(120.0, gt=0)
    """A replica that for so long has neither answered a probe nor sent a byte for any of its legs hangs: it is taken
    out, and its legs are ended and run elsewhere. An engine that compiles, or connects to a peer for the first time,
    was seen to answer nothing for 30 s and for 108 s (field case A15)."""
    leg_failures: int = Field(3, ge=1)
    """Failed legs in a row (5xx, lost connections, no answer in time) that take a replica out. A replica that
    can't be connected to is out at once; 4xx never counts (field case A13)."""
    breaker_open_s: float = Field(1.0, gt=0)
    """How long a replica that was taken out rests before it may be tried again; twice as long each time that the try
    fails."""
    breaker_max_open_s: float = Field(30.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [engine.name for engine in self.engines]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"engines: names must be unique, {', '.join(twice)} stand(s) there more than once")
        if self.handoff_margin_s >= self.handoff_lease_s:
            raise ValueError(
                f"handoff_margin_s ({self.handoff_margin_s}) must be below handoff_lease_s ({self.handoff_lease_s}): "
                "otherwise no handoff is ever young enough to be sent"
            )
        if self.connect_timeout_s + self.handoff_margin_s > self.handoff_lease_s:
            raise ValueError(
                f"connect_timeout_s ({self.connect_timeout_s}) and handoff_margin_s ({self.handoff_margin_s}) must fit "
                f"into handoff_lease_s ({self.handoff_lease_s}) together: otherwise a connection that hangs always "
                "counts as an expired handoff and never as an unreachable engine"
            )
        if self.keepalive_s >= self.engine_keepalive_s:
            raise ValueError(
                f"keepalive_s ({self.keepalive_s}) must be below engine_keepalive_s ({self.engine_keepalive_s}): "
                "otherwise requests meet connections that their engine has closed"
            )
        return self
