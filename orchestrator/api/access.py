"""Who may call what. `guard.py` asks here for each request; `store/tokens.py` reads the tokens."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping

from orchestrator.store.tokens import ROLES, Role

OPEN_PATHS = ("/health",)
PAGE = "/page/"
"""Files of the page lie below: they are the same for everybody."""
_TRAINERS_PATH = re.compile(r"/jobs/[^/]+/(weights|rlhf)(/.*)?|/operations/[^/:]+:[^/:]+:update:[0-9]+/cancel")


class Access:
    """Knows tokens by their hashes alone, so that no dump or error text can hold one."""

    def __init__(self, roles: Mapping[str, Role], where: str = "") -> None:
        """`where`: tokens are to be found, in words, for callers on this machine that have none."""
        self.where = where
        self._roles = {_hash(token.encode()): role for token, role in roles.items()}

    def role_of(self, token: bytes) -> Role | None:
        """None for an unknown token, and for none: nobody has an empty one."""
        if not token:
            return None
        given = _hash(token)
        # All are compared, so that the time tells nothing of them.
        matching = [role for known, role in self._roles.items() if secrets.compare_digest(known, given)]
        return matching[0] if matching else None


def needed_role(method: str, path: str) -> Role | None:
    """The least role that may make a call; None where no token is asked for. What is not listed here takes an admin."""
    if path in OPEN_PATHS or path == "/" or path.startswith(PAGE):
        return None
    if method in ("GET", "HEAD"):
        return "viewer"
    return "trainer" if _TRAINERS_PATH.fullmatch(path) else "admin"


def includes(role: Role, needed: Role) -> bool:
    return ROLES.index(role) >= ROLES.index(needed)


def _hash(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
