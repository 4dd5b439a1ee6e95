"""Removes keys from a pool, leases or not, until none is left; prints `{"removed": <count>}` as one line.

    python remove_keys.py <master's host:port> [<regular expression>]      without one: every key of the master

Run as a file by the engine's interpreter, which has Mooncake and may lack everything else of Headrace: standard library
and Mooncake only. `pool_client.py` starts this and believes none of it without a count.
"""

from __future__ import annotations

import json
import socket
import sys
from typing import Any

BUFFER_BYTES = 1 << 20
"""Mooncake wants one; nothing goes through it."""


def main() -> None:
    master, *pattern = sys.argv[1:]
    # Looked for here: without Mooncake the message on stderr says so.
    from mooncake.store import MooncakeDistributedStore

    store: Any = MooncakeDistributedStore()
    # Removing is the master's work. This client moves no data, whatever the pool's protocol is.
    code = store.setup(_route_to(master), "P2PHANDSHAKE", 0, BUFFER_BYTES, "tcp", "", master)
    if code:
        sys.exit(f"no connection to the master at {master}: error {code}")
    removed = 0
    # Keys can come while others are removed.
    while found := store.remove_by_regex(*pattern, True) if pattern else store.remove_all(True):
        if found < 0:
            sys.exit(f"the master at {master} does not remove keys: error {found}")
        removed += found
    store.close()
    sys.stdout.write(json.dumps({"removed": removed}) + "\n")


def _route_to(master: str) -> str:
    """This machine's address towards the master; connecting a datagram socket sends nothing."""
    host, _, port = master.rpartition(":")
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        route: str = probe.getsockname()[0]
    return route


if __name__ == "__main__":
    main()
