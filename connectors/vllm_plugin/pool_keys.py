"""Where the pool keeps the KV of an epoch: the salts and the key prefixes that name one. No IO, no clock.

`router/core/epochs.py` makes salts, `epoch_store.py` in the engines reads them and files under prefixes,
`connectors/pool_client.py` counts and removes by prefix. Loaded by the engine's interpreter: standard library only.
"""

from __future__ import annotations

import re

_EPOCH = re.compile(r"(0|[1-9][0-9]{0,18})\.")
_SPECIAL = re.compile(r"[^A-Za-z0-9_@-]")


def epoch_salt(epoch: int, rest: str) -> str:
    """A `cache_salt` that says which epoch its request was dispatched in; `rest` tells the salts of one epoch apart."""
    return f"{epoch}.{rest}"


def epoch_of(salt: str | None) -> int | None:
    """The epoch that a salt names; None where it names none: such a request has no part in the pool."""
    named = _EPOCH.match(salt or "")
    return int(named[1]) if named else None


def job_prefix(cache_prefix: str) -> str:
    """What all keys of a job begin with as vLLM builds them, and no other job's."""
    return f"{cache_prefix}@"


def epoch_prefix(cache_prefix: str, epoch: int) -> str:
    """What all keys of one epoch of a job begin with in the pool, and no others."""
    return f"{cache_prefix}.{epoch}@"


def begins_with(prefix: str) -> str:
    """The regular expression of the keys that begin with `prefix`, as Mooncake reads them."""
    return "^" + _SPECIAL.sub(lambda special: "\\" + special[0], prefix)
