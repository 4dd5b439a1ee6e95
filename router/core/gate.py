"""The router's switch towards the engines, and the order of the commands that move it.

open: all goes. holding: no new request and no fresh attempt starts, second legs of running ones still go.
frozen: nothing is sent, and nothing is closed. Where a hold keeps what runs, nothing is closed either. A router starts
frozen, until the control plane tells it otherwise: it can't know which weights the engines hold. `io/admin.py` moves
it, `dispatcher.py` asks it before each leg, `flow.py` before it closes one.
"""

from __future__ import annotations

from typing import Literal, get_args

GateState = Literal["open", "holding", "frozen"]
GATE_STATES: tuple[GateState, ...] = get_args(GateState)

Order = tuple[int, int, int]
"""(update, attempt, step) of a command: what carries an older one comes from a control plane that has been
overtaken."""


class Gate:
    """The switch and the questions that it answers."""

    def __init__(self) -> None:
        self.state: GateState = "frozen"
        self.keeps = False
        """What runs lives through this hold, until the gate opens: engines are paused under it, also while the second
        legs of others still go."""
        self.order: Order = (0, 0, 0)
        """Of the newest command that was taken."""

    def accepts(self, order: Order) -> bool:
        """Is this order not older than the newest taken? The same one again is a repetition and welcome."""
        return order >= self.order

    def take(self, order: Order) -> None:
        """A command with this order is being carried out: from now on older ones are refused."""
        assert self.accepts(order), f"{order} is older than {self.order}"
        self.order = order

    def set(self, state: GateState) -> None:
        self.state = state
        self.keeps = self.keeps and state != "open"

    @property
    def may_start(self) -> bool:
        """May a first leg (of a new request or of a fresh attempt) be sent?"""
        return self.state == "open"

    @property
    def may_continue(self) -> bool:
        """May the second leg of a running request be sent?"""
        return self.state != "frozen"

    @property
    def may_close(self) -> bool:
        """May a leg be ended? An abort that reaches a paused engine can kill it (field case A27)."""
        return self.state != "frozen" and not self.keeps
