"""The router's switch towards the engines.

open: all goes. holding: no new request and no fresh attempt starts, second legs of running ones still go.
frozen: nothing is sent. A router starts frozen, until the control plane tells it otherwise: it can't know
which weights the engines hold. `io/admin.py` sets it, `flow.py` asks it before each leg.

While the gate is not open, `flow.py` refuses new requests (503 with Retry-After). The bounded queue of held requests
belongs in front of exactly that check: `Flow._arrived` is the one place where `may_start` is asked for a
request that has no leg yet.
"""

from __future__ import annotations

from typing import Literal, get_args

GateState = Literal["open", "holding", "frozen"]
GATE_STATES: tuple[GateState, ...] = get_args(GateState)


class Gate:
    """The switch and the two questions that a request asks it."""

    def __init__(self) -> None:
        self.state: GateState = "frozen"

    def set(self, state: GateState) -> None:
        self.state = state

    @property
    def may_start(self) -> bool:
        """May a first leg (of a new request or of a fresh attempt) be sent?"""
        return self.state == "open"

    @property
    def may_continue(self) -> bool:
        """May the second leg of a running request be sent?"""
        return self.state != "frozen"
