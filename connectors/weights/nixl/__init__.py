"""Weights by one-sided reads, straight from the memory of those who have them.

reads.py, leases.py          pure: which bytes from whom; who may still read
messages.py                  what both sides say to each other, and why nothing torn is believed
desk.py, server.py           the producer's side, in a trainer or in an engine that serves a peer
client.py, transfers.py, session.py, transport.py    the reader's side
agent.py                     NIXL's agent and registered memory, for both
"""
