"""Pure decisions: events in, instructions out. No threads, clocks, sockets, files or randomness."""
