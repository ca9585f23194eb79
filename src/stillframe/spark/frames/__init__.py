"""DataFrames on both sides of a job: its input, its epochs, its snapshots and savepoints."""
