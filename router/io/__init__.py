"""The router's shell: sockets, tasks and the clock. It decides nothing."""
