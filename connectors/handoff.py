"""The handoff's dialect: what a prefill engine is asked for and what its reply holds, in NIXL's terms.

`router/core/split/` puts the request on the P leg, takes the handoff from its reply and gives it to the D leg, byte
for byte: what stands inside a handoff is between the engines.
"""

from __future__ import annotations

import json

PARAMS_FIELD = "kv_transfer_params"
"""The field of a request's and of a reply's top level."""

REMOTE_DECODE = json.dumps(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    },
    separators=(",", ":"),
).encode()
"""The value on the P leg: keep the prompt's KV for a decode engine and say where it is."""

_NOTHING = (b"", b"null", b"{}", b"[]", b"false")


def handed_over(params: bytes) -> bytes | None:
    """The handoff in a P reply, if there is one: `params` is the JSON text of its `PARAMS_FIELD`, empty without it."""
    return None if params in _NOTHING else params
