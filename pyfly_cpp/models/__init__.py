"""Which files there are: on this machine, and on the hub."""
