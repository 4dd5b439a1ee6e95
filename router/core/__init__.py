"""The router's decisions: no async, no IO, no clock, no dice. Time comes in as `now`."""
