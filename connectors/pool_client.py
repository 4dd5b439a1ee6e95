"""What the control plane asks of a job's pool: which keys there are, and that some of them go. Blocking.

The weight coordinator purges an epoch once nobody reads it any more; `vllm_plugin/pool_keys.py` says under which keys
it lies. With a stock store connector epochs have no keys of their own; then everything goes, once, while the whole
fleet is paused. Removing needs Mooncake's client, so `remove_keys.py` does it under the engine's interpreter. So does
`block_hashes.py` with vLLM's own hashing, for an audit that wants to name a prompt's keys.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from connectors.engine_env import HASH_SEED
from connectors.store_argv import CAPACITY_METRIC, KEYS_METRIC, USED_METRIC
from connectors.vllm_plugin.pool_keys import begins_with, epoch_prefix

AGAIN_S = 0.2
"""A key whose put has not ended can be counted and not be removed."""
SCRIPT_S = 1.0
"""Not begun with less: an interpreter and its imports take so long."""
SHOWN = 300
"""Characters of a message that an error repeats."""


class PoolCallFailed(Exception):
    """The pool did not do what was asked, or it is not known whether it did; the text says why."""


@dataclass(frozen=True, kw_only=True)
class SaltedPrompt:
    """What the blocks of a prompt are filed under."""

    token_ids: tuple[int, ...]
    salt: str
    """As engines get it."""
    key_prefix: str
    """Of its epoch."""


@dataclass(frozen=True, kw_only=True)
class PoolUse:
    """What the master says of the whole pool, other jobs' part of it included."""

    mounted_bytes: int
    """DRAM that storage clients lend now."""
    used_bytes: int
    keys: int


@dataclass(frozen=True, kw_only=True)
class PoolClient:
    """One job's access to its master."""

    python: str
    """The engine's interpreter."""
    master_address: str
    """host:port"""
    metrics_url: str | None
    """Of the master. None where the job joins one that it does not run: then a removal is believed when the master
    finds nothing more to remove."""

    def purge_epoch(self, cache_prefix: str, epoch: int, timeout_s: float) -> int:
        """Remove all KV of one epoch of one job, read or not, and nothing else. Returns the keys removed; none is left.

        Raises:
            PoolCallFailed: some may be left.
        """
        return self._remove(epoch_prefix(cache_prefix, epoch), timeout_s)

    def wipe(self, timeout_s: float) -> int:
        """Remove everything that the master has, other jobs' KV too. Returns the keys removed; none is left.

        Raises:
            PoolCallFailed: some may be left.
        """
        return self._remove("", timeout_s)

    def count_keys(self, prefix: str, timeout_s: float) -> int:
        """How many keys begin with `prefix`.

        Raises:
            PoolCallFailed: the master does not say.
        """
        with self._keys(prefix, timeout_s) as keys:
            return sum(1 for _ in keys)

    def use(self, timeout_s: float) -> PoolUse:
        """How much there is, and how much of it is taken.

        Raises:
            PoolCallFailed: the master does not say.
        """
        if self.metrics_url is None:
            raise PoolCallFailed(f"the master at {self.master_address} has no known address for questions")
        try:
            reply = httpx.get(self.metrics_url, timeout=timeout_s, trust_env=False)
            reply.raise_for_status()
            families = text_string_to_metric_families(reply.text)
            told = {sample.name: int(sample.value) for family in families for sample in family.samples}
            return PoolUse(mounted_bytes=told[CAPACITY_METRIC], used_bytes=told[USED_METRIC], keys=told[KEYS_METRIC])
        except (httpx.HTTPError, ValueError, OverflowError, KeyError) as error:
            raise PoolCallFailed(f"GET {self.metrics_url}: {error or type(error).__name__}") from error

    def keys_of(
        self, prompts: Sequence[SaltedPrompt], block_size: int, hash_algorithm: str, timeout_s: float
    ) -> list[tuple[str, ...]]:
        """Per prompt, the keys that hold its blocks, in its order; those of all ranks and layer groups.

        Raises:
            PoolCallFailed: it cannot be found out.
        """
        asked = {"prompts": [asdict(each) for each in prompts], "block_size": block_size, "algorithm": hash_algorithm}
        hashes = self._run_script("block_hashes.py", [], timeout_s, asked)
        found: list[tuple[str, ...]] = []
        for prompt, of_prompt in zip(prompts, hashes, strict=True):
            places = {block_hash: place for place, block_hash in enumerate(of_prompt)}
            with self._keys(prompt.key_prefix, timeout_s) as keys:
                placed = [(places[each], key) for key in keys if (each := key.rpartition("@")[2]) in places]
            found.append(tuple(key for _, key in sorted(placed)))
        return found

    @contextmanager
    def _keys(self, prefix: str, timeout_s: float) -> Iterator[Iterator[str]]:
        """Those that begin with `prefix`; there can be millions in all."""
        if self.metrics_url is None:
            raise PoolCallFailed(f"the master at {self.master_address} has no known address for questions")
        url = f"{self.metrics_url.removesuffix('/metrics')}/get_all_keys"
        try:
            with httpx.stream("GET", url, timeout=timeout_s, trust_env=False) as reply:
                reply.raise_for_status()
                yield (key for key in reply.iter_lines() if key and key.startswith(prefix))
        except httpx.HTTPError as error:
            raise PoolCallFailed(f"GET {url}: {error or type(error).__name__}") from error

    def _remove(self, prefix: str, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        removed = 0
        while True:
            removed += self._remove_once(prefix, deadline - time.monotonic())
            if self.metrics_url is None:
                return removed
            left = self.count_keys(prefix, max(AGAIN_S, deadline - time.monotonic()))
            if not left:
                return removed
            if time.monotonic() + AGAIN_S + SCRIPT_S > deadline:
                raise PoolCallFailed(f"{left} keys {prefix}... are still in the pool after {timeout_s:.0f} s")
            time.sleep(AGAIN_S)

    def _remove_once(self, prefix: str, timeout_s: float) -> int:
        arguments = [self.master_address, *([begins_with(prefix)] if prefix else [])]
        return int(self._run_script("remove_keys.py", arguments, timeout_s)["removed"])

    def _run_script(
        self, name: str, arguments: Sequence[str], timeout_s: float, given: Mapping[str, Any] | None = None
    ) -> Any:
        """What one of this folder's scripts prints as its last line, under the engine's interpreter."""
        command = [self.python, "-P", str(Path(__file__).resolve().with_name(name)), *arguments]
        try:
            done = subprocess.run(
                command,
                input=json.dumps(given),
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=True,
                # Elsewhere, as engines are started: what a relative PYTHONPATH finds from here, they would not.
                cwd="/",
                env={**os.environ, "PYTHONHASHSEED": HASH_SEED},
            )
            return json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired as error:
            raise PoolCallFailed(f"{name} did not end within {timeout_s:.0f} s") from error
        except subprocess.CalledProcessError as error:
            raise PoolCallFailed(f"{name} {' '.join(arguments)}: {error.stderr.strip()[-SHOWN:]}") from error
        except (OSError, ValueError, IndexError) as error:
            raise PoolCallFailed(f"{self.python} cannot run {name}: {error}") from error
