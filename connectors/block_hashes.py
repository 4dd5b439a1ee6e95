"""The hashes under which an engine files the blocks of prompts; prints one JSON list of them per prompt.

    python block_hashes.py < FILE

reads {"prompts": [{"token_ids": [...], "salt": "..."}], "block_size": 32, "algorithm": "sha256"}

Run as a file by the engine's interpreter, with the engine's PYTHONHASHSEED: standard library and vLLM only.
`pool_client.py` starts this and looks for the hashes among the pool's keys.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    asked = json.load(sys.stdin)
    # Looked for here: without vLLM the message on stderr says so.
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_block: Any = get_hash_fn_by_name(asked["algorithm"])
    init_none_hash(hash_block)
    hasher = get_request_block_hasher(asked["block_size"], hash_block)
    hashes = []
    for prompt in asked["prompts"]:
        request = Request(
            request_id="",
            prompt_token_ids=prompt["token_ids"],
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=prompt["salt"],
            block_hasher=hasher,
        )
        hashes.append([each.hex() for each in request.block_hashes])
    sys.stdout.write(json.dumps(hashes) + "\n")


if __name__ == "__main__":
    main()
