"""The sets of weights that are pushed in turn, and the names of their versions: by the name that a reply's label gives
one knows which set the reply must be made with. Needs no engine stack."""

from __future__ import annotations

WEIGHTS = 6
"""Sets that there are; a job starts with number 0. `checkpoints.py` has them."""
FIRST_VERSION = "initial"
"""As a job calls what its engines have started with."""


def version_name(weights: int, push: int) -> str:
    """A name for a set of weights; each push has its own, so that none is found to be there already."""
    return f"weights-{weights}-push-{push}"


def weights_of(version: str) -> int:
    """The number of the set that a version's name stands for."""
    return 0 if version == FIRST_VERSION else int(version.split("-")[1])
