"""One slot: the loop, its tasks, their inputs and outputs, and the network between slots."""
