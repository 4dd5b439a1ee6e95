"""What a route begins and does not wait for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from orchestrator.errors import HeadraceError

_LOG = logging.getLogger(__name__)


def in_background(act: Callable[[], object], name: str) -> None:
    """Failures are recorded as the job's phase and reason by the act itself; the log has them too."""

    def run() -> None:
        try:
            act()
        except HeadraceError as error:
            _LOG.warning("%s: %s", name, error)
        except Exception:
            _LOG.exception("%s failed in a way that was not foreseen", name)

    threading.Thread(target=run, name=name, daemon=True).start()
