"""Weights of a running engine, replaced in place: what happens inside vLLM's workers.

    settings.py     how this engine takes weights, from its environment
    verdict.py      what one rank says of a command: data for the wire
    recorder.py     the model's own loaders, run on tensors without data: what goes where
    recording.py    what they did, as data
    layers.py       vLLM's layerwise reload, one layer at a time: the one file with private calls into vLLM
    pages.py        memory for modules while they are open
    geometry.py     strided regions and boxes, as arithmetic
    plan.py         recording -> load plan: groups of fills
    planner.py      keeps the plan as long as manifests are equal
    numbers.py      what a load took
    load.py         the one load path, group by group
    host_copy.py    `cpu_prefetch`: a copy of this rank's slices, fetched while the engine generates
    prefetching.py  that copy between commands
    transports.py   those of `connectors/weights/` by name
    peers.py        this engine as a source for others
    agreement.py    one verdict over all ranks of the engine
    rank.py         one rank's commands and state; never raises
    extension.py    rank.py as methods of vLLM's worker
    backend.py      rank.py behind vLLM's own weight routes

`connectors/weights/` has the transports; `vllm_plugin/weight_routes.py` brings the commands of HTTP here.
"""
