"""The program `headrace`: `cli.py`, once it has been loaded."""

from __future__ import annotations

import sys


def main() -> None:
    """Nothing has been begun while it is loaded, which takes about a second."""
    try:
        from orchestrator import cli
    except KeyboardInterrupt:
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
