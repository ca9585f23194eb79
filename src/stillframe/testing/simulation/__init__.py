"""Whole jobs on one thread, in virtual time, from one seed: the real protocol under any schedule.

The simulator drives the code that runs on Spark: subtasks and their operators, alignment, keyed
state and its snapshots, the coordinator's attempt, ledger, job log, restore and commits. Only the
loop, the network, the clock, the storage below the store's contract and the outside world are
replaced. See docs/simulation.md.
"""
