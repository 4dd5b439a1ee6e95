"""What trainer and engine share: the words of a weight load, and the transports.

    tensors.py     slices of checkpoint tensors, as arithmetic: no torch, no IO
    source.py      the contract between a load and its transport
    path.py, store.py, nixl/    the transports

Needs torch and, per transport, its library; never vLLM: a trainer imports it too.
"""
