"""The names things go by: one type per kind of number, so that they cannot be mixed up."""

from __future__ import annotations

from typing import NewType

CheckpointId = NewType("CheckpointId", int)
"""Counts the checkpoints of a job upward from 1, across attempts; never reused."""

Attempt = NewType("Attempt", int)
"""One run of a job between restarts, counted from 1; the fencing number."""

Epoch = NewType("Epoch", int)
"""Counts the *completed* checkpoints of a job densely from 0: aborted ones leave no gap."""

SlotIndex = NewType("SlotIndex", int)
SubtaskIndex = NewType("SubtaskIndex", int)
ChannelIndex = NewType("ChannelIndex", int)
"""An input channel of one subtask, counted from 0."""

KeyGroup = NewType("KeyGroup", int)
OperatorUid = NewType("OperatorUid", str)

NO_CHECKPOINT = CheckpointId(0)
"""Before the first checkpoint; the coordinator counts from 1."""
