"""What an installed engine stack can do: asked of the installed code, not guessed from version numbers.

`orchestrator/observe` calls `ask` once and gives the answer to the planner as a fact.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from connectors.types import EngineAbilities

ASK_TIMEOUT_S = 60.0


class EngineNotFound(Exception):
    """The interpreter cannot be run, or has no vLLM."""


def ask(python: str) -> EngineAbilities:
    """Ask the interpreter at `python` what it can do.

    Raises:
        EngineNotFound: it cannot be run, or has no vLLM; the text says which.
    """
    script = Path(__file__).resolve().with_name("ask_engine.py")
    command = [python, "-P", str(script)]
    try:
        # Elsewhere, as engines are started: what a relative PYTHONPATH finds from here, they would not.
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True, cwd="/")
        data = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        raise EngineNotFound(f"{python} failed: {error.stderr.strip()[-500:]}") from error
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise EngineNotFound(f"{python} cannot be asked for its engine stack: {error}") from error
    if "missing" in data:
        raise EngineNotFound(f"{python} has no {data['missing']} installed")
    data["kv_cache_layouts"] = tuple(data["kv_cache_layouts"])
    return EngineAbilities(**data)
