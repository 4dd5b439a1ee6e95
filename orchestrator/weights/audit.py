"""Replays requests without any older cache and holds what the fleet answered against it: looks for stale or corrupt KV.

Requests are those that the router has kept (`[audit] share`) or, where none of them can be judged, probes: prompts of
this audit's own that are answered from the pool. `replay_client.py` asks, `agreement.py` judges. Blocking;
`orchestrator/service.py` and `audit_rounds.py` call it.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import httpx

from connectors.engine_client import CLEAR_EVERY_S, SMALLEST_VOCABULARY, EngineCallFailed, EngineClient
from connectors.pool_client import PoolCallFailed, PoolClient, SaltedPrompt
from connectors.replays import Generated, NotReplayable, read_generated
from connectors.vllm_plugin.pool_keys import epoch_prefix, job_prefix
from orchestrator.errors import AuditFailed
from orchestrator.plan.types import EnginePlan, JobPlan, PoolPlan
from orchestrator.weights.agreement import Judgement, judge
from orchestrator.weights.replay_client import ReplayClient, one_off
from orchestrator.weights.router_client import RouterCallFailed, RouterClient
from router.core.epochs import Salter
from router.core.finished import AuditOutcome, FinishedRequest

TOKENS = 8
"""Of a reply, that are compared: stale KV of a prompt shows in the first ones."""
RUNS = 2
"""Of a replay."""
KEYS_TIMEOUT_S = 120.0
"""Loading vLLM for its hashes takes most of it."""
CLEAR_WITHIN_S = 60.0
"""An engine does not clear its cache while requests or saves hold blocks of it."""
STALE = "stale or corrupt KV"
PROBE_BLOCKS = 4


@dataclass(frozen=True, kw_only=True)
class Audited:
    """One request, and what its audit found."""

    id: str
    """The router's own; of a probe its salt."""
    kind: Literal["request", "probe"]
    epoch: int
    version: str
    replicas: Mapping[str, str]
    prompt: SaltedPrompt | None = None
    cached_tokens: int | None = None
    """Of the prompt, that were not computed: from the prefill engine's own cache or the pool."""
    judgement: Judgement | None = None
    skipped: str = ""
    """Why there is none."""
    keys: tuple[str, ...] = ()
    """Where it disagrees: those in the pool that hold blocks of its prompt."""
    keys_unknown: str = ""
    """Why they can't be named."""

    @property
    def outcome(self) -> AuditOutcome:
        return "skipped" if self.judgement is None else self.judgement.outcome

    def __str__(self) -> str:
        parts = " > ".join(self.replicas.values())
        what = f"{self.kind} {self.id}, epoch {self.epoch}{f' ({self.version}), {parts}' if parts else ''}"
        if self.judgement is None or self.prompt is None:
            return f"{what}: skipped: {self.skipped}"
        judged = self.judgement
        cached = "" if self.cached_tokens is None else f"{self.cached_tokens} cached of "
        verdict = STALE if judged.outcome == "disagrees" else judged.outcome
        return (
            f"{what}, {cached}{len(self.prompt.token_ids)} prompt tokens: {verdict}: off by {judged.off_by:.2g} at "
            f"token {judged.at} of {judged.compared}, allowed {judged.allowed:.2g}, noise {judged.noise:.2g}"
        )


def audit(plan: JobPlan, most: int) -> tuple[Audited, ...]:
    """Audit the newest of the requests that were kept, at most so many; where none can be judged, as many probes.

    Raises:
        AuditFailed: it could not be made.
    """
    with _auditor(plan) as auditor:
        found = auditor.kept(most, frozenset())
        if plan.pool is not None and all(each.judgement is None for each in found):
            found += [auditor.probe() for _ in range(most)]
        return auditor.closed(found)


def audit_kept(plan: JobPlan, most: int, but: frozenset[str]) -> tuple[Audited, ...]:
    """The same without probes, and without the requests of these ids."""
    with _auditor(plan) as auditor:
        return auditor.closed(auditor.kept(most, but))


@contextmanager
def _auditor(plan: JobPlan) -> Iterator[_Auditor]:
    if plan.audit.impossible is not None:
        raise AuditFailed(plan.audit.impossible)
    try:
        salter = Salter(Path(plan.router.token_file).read_text(encoding="ascii").strip().encode())
        with RouterClient(plan.router) as router, ReplayClient(plan.router.url, plan.model_name) as client:
            yield _Auditor(plan, router, client, salter)
    except (RouterCallFailed, EngineCallFailed, OSError) as error:
        raise AuditFailed(str(error)) from error
    except httpx.HTTPError as error:
        raise AuditFailed(f"{plan.router.url}: {str(error) or type(error).__name__}") from error


@dataclass(frozen=True)
class _Auditor:
    """Of one job."""

    plan: JobPlan
    router: RouterClient
    client: ReplayClient
    salter: Salter

    def kept(self, most: int, but: frozenset[str]) -> list[Audited]:
        held = {replica.epoch for replica in self.router.state().replicas.values()}
        kept = [each for each in self.router.finished() if each.id not in but]
        return [self._request(each, held) for each in kept[-most:]]

    def _request(self, finished: FinishedRequest, held: set[int | None]) -> Audited:
        """One that the router has kept. `held`: the epochs that replicas are in."""
        begun = Audited(
            id=finished.id,
            kind="request",
            epoch=finished.epoch,
            version=finished.version,
            replicas=finished.replicas,
        )
        if finished.epoch not in held:
            return replace(begun, skipped=f"its epoch {finished.epoch} has gone")
        body = json.loads(finished.body)
        try:
            return self._judged(begun, read_generated(body, finished.reply), body.get("cache_salt"))
        except NotReplayable as why:
            return replace(begun, skipped=str(why))

    def probe(self) -> Audited:
        """One that is answered from the pool: asked, forgotten by its prefill engine, asked again."""
        salt = one_off()
        with self._engine(self.plan.engines[0]) as engine:
            length = PROBE_BLOCKS * engine.cache_config().block_size + 2
        prompt = tuple(1 + secrets.randbelow(SMALLEST_VOCABULARY) for _ in range(length))
        begun = Audited(id=salt, kind="probe", epoch=0, version="", replicas={})
        try:
            first, _ = self.client.complete(prompt, salt, TOKENS)
            begun = replace(begun, epoch=first.epoch, version=first.version, replicas=first.replicas)
            if not self._forget(first.replicas["prefill"]):
                return replace(begun, skipped=f"{first.replicas['prefill']} is too busy to clear its own cache")
            second, given = self.client.complete(prompt, salt, TOKENS)
            if second.epoch != first.epoch:
                return replace(begun, skipped="weights changed between its two requests")
            begun = replace(begun, replicas=second.replicas)
            if not given.cached_tokens:
                return replace(begun, skipped="nothing of it came from the pool")
            return self._judged(begun, given, salt)
        except NotReplayable as why:
            return replace(begun, skipped=str(why))

    def closed(self, found: Sequence[Audited]) -> tuple[Audited, ...]:
        """Count the outcomes, and name the keys of requests that disagree."""
        self.router.tell_audited(Counter(each.outcome for each in found))
        wrong = {each.id: each.prompt for each in found if each.outcome == "disagrees" and each.prompt is not None}
        if not wrong or self.plan.pool is None:
            return tuple(found)
        try:
            keys = dict(zip(wrong, self._keys(self.plan.pool, list(wrong.values())), strict=True))
        except (PoolCallFailed, EngineCallFailed) as error:
            return tuple(replace(each, keys_unknown=str(error)) if each.id in wrong else each for each in found)
        return tuple(replace(each, keys=keys.get(each.id, ())) for each in found)

    def _judged(self, begun: Audited, given: Generated, client_salt: str | None) -> Audited:
        """Raises `NotReplayable`."""
        replays = self.client.replay(given, begun.epoch, TOKENS, RUNS)
        judgement = judge(given.logprobs[:TOKENS], replays)
        if judgement.outcome == "disagrees":
            # Rare, so it may cost more: two runs may have been alike by luck.
            replays += self.client.replay(given, begun.epoch, TOKENS, RUNS)
            judgement = judge(given.logprobs[:TOKENS], replays)
        return replace(
            begun,
            prompt=SaltedPrompt(
                token_ids=given.prompt,
                salt=self.salter.salt(begun.epoch, client_salt or None),
                key_prefix=_key_prefix(self.plan.pool, begun.epoch),
            ),
            cached_tokens=given.cached_tokens,
            judgement=judgement,
        )

    def _forget(self, name: str) -> bool:
        """Clear a replica's own prefix cache and nothing of the pool; False where it holds blocks for too long."""
        deadline = time.monotonic() + CLEAR_WITHIN_S
        with self._engine(next(each for each in self.plan.engines if each.name == name)) as engine:
            while engine.reset_local_cache() is False:
                if time.monotonic() > deadline:
                    return False
                time.sleep(CLEAR_EVERY_S)
        return True

    def _keys(self, pool: PoolPlan, prompts: Sequence[SaltedPrompt]) -> list[tuple[str, ...]]:
        client = PoolClient(python=pool.python, master_address=pool.master_address, metrics_url=pool.metrics_url)
        with self._engine(self.plan.engines[0]) as engine:
            block_size = engine.cache_config().block_size
        return client.keys_of(prompts, block_size, self.plan.audit.hash_algorithm, KEYS_TIMEOUT_S)

    @staticmethod
    def _engine(engine: EnginePlan) -> EngineClient:
        return EngineClient(engine.url, engine.token_file)


def _key_prefix(pool: PoolPlan | None, epoch: int) -> str:
    """What the keys of an epoch begin with; those of a stock store connector name none."""
    if pool is None:
        return ""
    return epoch_prefix(pool.cache_prefix, epoch) if pool.epoch_keys else job_prefix(pool.cache_prefix)
