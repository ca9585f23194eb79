"""The HTTP API of a driver: what its jobs do, and how they are told to do something else."""
