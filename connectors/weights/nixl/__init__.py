"""Weights by one-sided reads, straight from the memory of those who have them.

`server.py` is the producer's side, `transport.py` the reader's; README.md has the picture. Nothing is imported here:
`reads.py`, `leases.py` and `messages.py` need neither torch nor NIXL.
"""
