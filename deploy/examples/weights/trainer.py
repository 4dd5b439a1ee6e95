"""An example to start from: a trainer that changes its weights every few seconds and publishes each version.

    torchrun --nproc-per-node 2 deploy/examples/weights/trainer.py --model MODEL --transport path --folder VERSIONS
    torchrun --nproc-per-node 2 deploy/examples/weights/trainer.py --model MODEL --transport nixl \\
        --engine http://127.0.0.1:8100 --token-file TOKEN

FSDP2 over gloo on CPUs, over NCCL on GPUs. What a real trainer has to do is in `main`;
`connectors/publisher/publisher.py` says what every publisher is, and the README beside it how the transports differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from connectors.engine_client import CommandOrder, EngineCallFailed, EngineClient
from connectors.publisher.nixl import NixlPublisher
from connectors.publisher.path import PathPublisher
from connectors.publisher.publisher import Publisher
from connectors.publisher.store import StorePublisher
from connectors.weights.source import SourceInfo
from connectors.weights.store_client import Volume

BATCH, TOKENS = 4, 64
LOAD_S = 300.0


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _arguments(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # gloo carries what publishers say to each other, NCCL the gradients of GPUs.
    distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = _sharded_model(arguments.model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    publisher = _publisher(arguments)
    for update in range(1, arguments.versions + 1):
        loss = _train(model, optimizer, device, arguments.every)
        publication = publisher.publish(model, f"step-{update}")
        if distributed.get_rank() == 0:
            _say({"loss": round(loss, 4), "source": publication.source})
            for url in arguments.engine:
                _update_engine(url, arguments.token_file, publication.source, update)
        # From here on the optimizer may write. Engines that were told here have loaded by now.
        publication.wait_done(arguments.wait, readers=0 if arguments.engine else arguments.readers)
    publisher.close()
    distributed.destroy_process_group()


def _sharded_model(folder: Path, device: str) -> nn.Module:
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device)
    mesh = init_device_mesh(device, (distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded: nn.Module = model
    return sharded


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, device: str, seconds: float) -> float:
    """Steps on random tokens for about so long; all ranks take as many. The last loss."""
    vocabulary = model.config.vocab_size
    began, loss = time.monotonic(), 0.0
    goes_on = torch.ones(1)
    while goes_on:
        tokens = torch.randint(vocabulary, (BATCH, TOKENS), device=device)
        outcome = model(input_ids=tokens, labels=tokens).loss
        outcome.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = float(outcome)
        goes_on = torch.tensor([float(time.monotonic() - began < seconds)])
        distributed.broadcast(goes_on, src=0)
    return loss


def _publisher(arguments: argparse.Namespace) -> Publisher:
    if arguments.transport == "path":
        return PathPublisher(arguments.folder, model=arguments.model, keep=arguments.keep)
    if arguments.transport == "store":
        volume = Volume(master=arguments.volume, protocol="tcp", host=arguments.host, devices=(), lend_bytes=0)
        return StorePublisher(volume, job=arguments.job, keep=arguments.keep)
    return NixlPublisher(host=arguments.host)


def _update_engine(url: str, token_file: str, source: SourceInfo, update: int) -> None:
    """One engine on its own: pause, load, resume, confirm. In a job Headrace's control plane does this for all."""
    token = Path(token_file).read_text(encoding="ascii").strip()
    with EngineClient(url, token_file, timeout_s=LOAD_S) as engine:
        try:
            instance = engine.fence().instance
            _post(f"{url}/pause?mode=abort&clear_cache=false", token)
            answer = engine.load_weights(instance, source, CommandOrder(update=update, attempt=0, step=1))
            _post(f"{url}/resume", token)
            if not answer.ok:
                raise EngineCallFailed(answer.error)
            engine.confirm_epoch(instance, update, CommandOrder(update=update, attempt=0, step=2))
            _say({"engine": url, "version": answer.version})
        except (EngineCallFailed, httpx.HTTPError) as error:
            # Training goes on; an engine that has not loaded serves its old weights, or is fenced.
            _say({"engine": url, "error": str(error)})


def _post(url: str, token: str) -> None:
    headers = {"authorization": f"Bearer {token}"}
    httpx.post(url, headers=headers, timeout=LOAD_S, trust_env=False).raise_for_status()


def _say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on random tokens, publish each version.")
    parser.add_argument("--model", type=Path, required=True, help="an HF folder: the weights to begin with")
    parser.add_argument("--transport", choices=["nixl", "store", "path"], required=True)
    parser.add_argument("--versions", type=int, default=1_000_000)
    parser.add_argument("--every", type=float, default=5.0, help="seconds of training between two versions")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for readers at most")
    parser.add_argument("--readers", type=int, help="generator ranks to wait for (nixl); else a control plane's word")
    parser.add_argument("--engine", action="append", default=[], metavar="URL", help="an engine to be told; repeatable")
    parser.add_argument("--token-file", help="with --engine: the token of its fence")
    parser.add_argument("--host", default="127.0.0.1", help="where engines reach this machine (nixl, store)")
    parser.add_argument("--folder", type=Path, help="path: where versions go")
    parser.add_argument("--volume", help="store: host:port of the weights' own Mooncake master")
    parser.add_argument("--job", default="example", help="store: what its objects are named after")
    parser.add_argument("--keep", type=int, default=2, help="path, store: versions that stay")
    arguments = parser.parse_args(argv)
    needed = {"path": "folder", "store": "volume"}.get(arguments.transport)
    if needed and getattr(arguments, needed) is None:
        parser.error(f"--transport {arguments.transport} needs --{needed}")
    if arguments.engine and not arguments.token_file:
        parser.error("--engine needs --token-file")
    return arguments


if __name__ == "__main__":
    main()
