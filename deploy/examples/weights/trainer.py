"""An example to start from: a trainer that changes its weights every few seconds and publishes each version.

    torchrun --nproc-per-node 2 deploy/examples/weights/trainer.py --model MODEL --transport path --folder VERSIONS
    torchrun --nproc-per-node 2 deploy/examples/weights/trainer.py --model MODEL --transport nixl \\
        --job-url http://127.0.0.1:8700/jobs/demo --token-file ~/.local/state/headrace/api-token

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
LOOK_EVERY_S = 0.2


class PushFailed(Exception):
    """The control plane has refused; the text says why."""


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
            if arguments.job_url:
                update_job(arguments.job_url, arguments.token_file, publication.source)
            for url in arguments.engine:
                _update_engine(url, arguments.token_file, publication.source, update)
        # From here on the optimizer may write. Whoever was told here has loaded by now, or does not any more.
        told = arguments.job_url or arguments.engine
        publication.wait_done(arguments.wait, readers=0 if told else arguments.readers)
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
        loss = outcome.item()
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


def update_job(url: str, token_file: str, source: SourceInfo) -> None:
    """All engines of a job, by its control API: push, and wait until that has ended, however it did. One at a time."""
    headers = {"authorization": f"Bearer {_token(token_file)}"}
    with httpx.Client(headers=headers, timeout=LOAD_S, trust_env=False) as api:
        try:
            update = _answer(api.post(f"{url}/weights", json={"source": source}))
            while update["outcome"] is None:
                time.sleep(LOOK_EVERY_S)
                update = _answer(api.get(f"{url}/weights/updates/{update['number']}"))
            _say({"job": url, **{field: update[field] for field in ("version", "outcome", "why")}})
        except (PushFailed, httpx.HTTPError) as error:
            # Training goes on; the job serves its old weights.
            _say({"job": url, "error": str(error)})


def _answer(reply: httpx.Response) -> Any:
    if reply.is_error:
        raise PushFailed(f"{reply.status_code}: {reply.text}")
    return reply.json()


def _update_engine(url: str, token_file: str, source: SourceInfo, update: int) -> None:
    """One engine on its own, of no job: pause, load, resume, confirm. A job's control plane does this for all."""
    token = _token(token_file)
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


def _token(file: str) -> str:
    return Path(file).read_text(encoding="ascii").strip()


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
    parser.add_argument(
        "--job-url", metavar="URL", help="a job to update: http://HOST:8700/jobs/NAME of headrace serve"
    )
    parser.add_argument("--engine", action="append", default=[], metavar="URL", help="an engine of no job; repeatable")
    parser.add_argument("--token-file", help="with --job-url: the API's token; with --engine: that of its fence")
    parser.add_argument("--host", default="127.0.0.1", help="where engines reach this machine (nixl, store)")
    parser.add_argument("--folder", type=Path, help="path: where versions go")
    parser.add_argument("--volume", help="store: host:port of the weights' own Mooncake master")
    parser.add_argument("--job", default="example", help="store: what its objects are named after")
    parser.add_argument("--keep", type=int, default=2, help="path, store: versions that stay")
    arguments = parser.parse_args(argv)
    needed = {"path": "folder", "store": "volume"}.get(arguments.transport)
    if needed and getattr(arguments, needed) is None:
        parser.error(f"--transport {arguments.transport} needs --{needed}")
    if arguments.job_url and arguments.engine:
        parser.error("--job-url and --engine: engines of a job are updated by its control plane alone")
    if (arguments.job_url or arguments.engine) and not arguments.token_file:
        parser.error("--job-url and --engine need --token-file")
    return arguments


if __name__ == "__main__":
    main()
