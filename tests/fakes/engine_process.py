"""An updatable stub engine as a process of its own, in the place of a planned engine. Run as a script:

    engine_process NAME ROLE PORT TOKEN_FILE

Its requests take long enough to be seen.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from connectors.vllm_plugin.fence_rules import FenceState
from tests.fakes.stub_engine import HANDOFF
from tests.fakes.updatable_engine import UpdatableEngine

TOKEN_S = 0.5


async def serve(name: str, role: str, port: int, token_file: Path) -> None:
    engine = UpdatableEngine(
        name=name,
        token=token_file.read_text().strip(),
        fence=FenceState(instance=f"{name}.{os.getpid()}"),
        handoff=HANDOFF if role == "prefill" else None,
    )
    engine.token_s, engine.tokens = TOKEN_S, ["a"] * 600
    await engine.start(port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])))
