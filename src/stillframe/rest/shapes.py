"""The shape of every answer, as a schema; `answers.py` makes them."""

from __future__ import annotations

from typing import get_args

from stillframe.protocol.diagnosis import Code
from stillframe.rest.answers import TASK_STATES
from stillframe.rest.figure_rows import RING_COLUMNS
from stillframe.rest.jobs import RINGS_OF_JOB, STATES
from stillframe.rest.kept_jobs import KEPT_STATES
from stillframe.rest.schemas import (
    COUNT,
    FLAG,
    ID,
    NUMBER,
    TEXT,
    Schema,
    described,
    listing,
    mapping,
    nullable,
    one_of,
    record,
)

MOMENT: Schema = described(
    {"type": "integer", "minimum": -1}, "Milliseconds since 1970; -1: not yet."
)
MS: Schema = described(COUNT, "Milliseconds.")
BYTES: Schema = described(COUNT, "Bytes.")
OPTIONAL_TEXT = nullable(TEXT)
OPTIONAL_COUNT = nullable(COUNT)

ERRORS = record({"errors": listing(TEXT)}, description="Why it was not done, one sentence each.")
NOTHING = record({})
REQUEST = record({"request-id": described(ID, "Ask with it what became of it.")})

EVENT_STREAM = {**TEXT, "contentMediaType": "text/event-stream"}

# --- jobs ---

_STATE = one_of(*STATES, *KEPT_STATES)
_TASK_COUNTS = dict.fromkeys(TASK_STATES, COUNT)
_STATUS_COUNTS = record({state.upper(): COUNT for state in TASK_STATES})
_TIMES: dict[str, Schema] = {"start-time": MOMENT, "end-time": MOMENT, "duration": MS}

JOBS = record({"jobs": listing(record({"id": ID, "status": _STATE}))})
OVERVIEW = record(
    {
        "jobs": listing(
            record(
                {
                    "jid": ID,
                    "name": TEXT,
                    "state": _STATE,
                    **_TIMES,
                    "last-modification": MOMENT,
                    "tasks": record({"total": COUNT, **_TASK_COUNTS}),
                }
            )
        )
    }
)
_VERTEX = record(
    {
        "id": ID,
        "name": TEXT,
        "maxParallelism": COUNT,
        "parallelism": COUNT,
        "status": one_of(*(state.upper() for state in TASK_STATES)),
        **_TIMES,
        "tasks": _STATUS_COUNTS,
    }
)
_MEASURED = (
    "read-bytes", "write-bytes", "read-records", "write-records", "accumulated-backpressured-time",
    "accumulated-idle-time",
)  # fmt: skip
_COMPLETE = tuple(f"{name}-complete" for name in _MEASURED[:4])
VERTEX = record(
    {
        "id": ID,
        "name": TEXT,
        "parallelism": COUNT,
        "maxParallelism": COUNT,
        "now": MOMENT,
        "subtasks": listing(
            record(
                {
                    "subtask": COUNT,
                    "status": one_of(*(state.upper() for state in TASK_STATES)),
                    "attempt": COUNT,
                    "endpoint": described(TEXT, "The slot's host."),
                    **_TIMES,
                    "taskmanager-id": TEXT,
                    "metrics": record(
                        {
                            **dict.fromkeys(_MEASURED, COUNT),
                            **dict.fromkeys(_COMPLETE, FLAG),
                            "accumulated-busy-time": NUMBER,
                        }
                    ),
                }
            )
        ),
    }
)
_AGGREGATES = ("min", "max", "avg", "sum", "skew")
METRICS = listing(record({"id": TEXT, **dict.fromkeys(_AGGREGATES, NUMBER)}, optional=_AGGREGATES))
_LEVEL = one_of("ok", "low", "high")
_LEVELS: dict[str, Schema] = {"backpressureLevel": _LEVEL, "backpressure-level": _LEVEL}
BACKPRESSURE = record(
    {
        "status": described(one_of("ok", "deprecated"), "deprecated: nothing is measured yet."),
        **_LEVELS,
        "end-timestamp": MOMENT,
        "subtasks": listing(
            record(
                {
                    "subtask": COUNT,
                    "attempt-number": COUNT,
                    **_LEVELS,
                    **dict.fromkeys(("ratio", "busyRatio", "idleRatio"), NUMBER),
                }
            )
        ),
    },
    optional=(*_LEVELS, "end-timestamp", "subtasks"),
)
WATERMARKS = listing(record({"id": TEXT, "value": TEXT}))
_PLAN = record(
    {
        "jid": ID,
        "name": TEXT,
        "type": TEXT,
        "nodes": listing(
            record(
                {
                    "id": ID,
                    "parallelism": COUNT,
                    "operator": TEXT,
                    "operator_strategy": TEXT,
                    "description": TEXT,
                    "optimizer_properties": record({}),
                    "inputs": listing(
                        record({"num": COUNT, "id": ID, "ship_strategy": TEXT, "exchange": TEXT})
                    ),
                }
            )
        ),
    }
)
_OWN_WORDS = record(
    {
        "run-id": described(TEXT, "Another one for every start."),
        "outcome": described(TEXT, "running, finished, stopped, cancelled or failed."),
        "message": described(TEXT, "What happened last."),
        "diagnosis": described(TEXT, "What the job waits for, or that it keeps up."),
        "trouble": described(
            listing(TEXT), "What is in its way now: a function that hangs, cores that are busy."
        ),
        "failure": described(OPTIONAL_TEXT, "Why the job failed."),
        "last-failure": described(OPTIONAL_TEXT, "Why an attempt failed last."),
        "last-failure-details": described(
            listing(TEXT), "Of an error in your code: operator, record and traceback, line by line."
        ),
        "guarantee": described(TEXT, "What holds for every record, whatever fails."),
        "guarantee-reasons": described(listing(TEXT), "Why it is not exactly-once."),
        "parallelism": COUNT,
        "attempts": COUNT,
        "restarts": COUNT,
        "records-in": COUNT,
        "records-out": COUNT,
        "records-late": COUNT,
        "records-malformed": described(COUNT, "Not what their schema declares."),
        "records-in-per-second": described(NUMBER, "Over the last ten seconds."),
        "watermark": described(
            nullable({"type": "integer"}),
            "Event time in the slowest operator, in milliseconds since 1970.",
        ),
        "lags": described(
            listing(
                record(
                    {
                        "uid": TEXT,
                        "source": TEXT,
                        "records": described(COUNT, "That are there and not yet read."),
                        "seconds": described(
                            nullable({"type": "number"}),
                            "Since the newest record that was read was written; 0 at the end.",
                        ),
                    }
                )
            ),
            "Of the sources that tell how far they are behind.",
        ),
        "last-checkpoint": OPTIONAL_COUNT,
        "checkpoint-location": OPTIONAL_TEXT,
        "slot-pids": listing(COUNT),
    },
    description="What Flink has no field for.",
)
JOB = record(
    {
        "jid": ID,
        "name": TEXT,
        "isStoppable": FLAG,
        "state": _STATE,
        **_TIMES,
        "maxParallelism": COUNT,
        "now": MOMENT,
        "timestamps": record(dict.fromkeys(STATES, MOMENT)),
        "vertices": listing(_VERTEX),
        "status-counts": _STATUS_COUNTS,
        "plan": _PLAN,
        "stillframe": _OWN_WORDS,
    }
)
DIAGNOSIS = record(
    {
        "code": described(one_of(*get_args(Code)), "For machines, and for translations."),
        "sentence": TEXT,
        "args": described(mapping({"type": ["string", "number"]}), "What the sentence names."),
    }
)
_SPENT = described(NUMBER, "Milliseconds of its time since the attempt began.")
_ALIGNING = record(
    {
        "checkpoint": COUNT,
        "arrived": described(COUNT, "Channels whose barrier has come."),
        "channels": COUNT,
        "since": described(MOMENT, "When the first one came."),
        "missing": described(
            listing({"type": "array", "items": {"type": ["string", "integer"]}}),
            "Task and subtask whose barrier is waited for; eight at most.",
        ),
    },
    description="Barriers that are waited for.",
)
_POINTS = listing(nullable(NUMBER))
_WINDOW = record(
    {
        "at": listing(MOMENT),
        "job": record(dict.fromkeys(RINGS_OF_JOB, _POINTS)),
        "tasks": listing(record({"task": COUNT, **dict.fromkeys(RING_COLUMNS, _POINTS)})),
    },
    description="A second or more between two points; null: not known, or longer ago than kept.",
)
_LATENCY = record(
    {
        "source": described(TEXT, "The task that sent them."),
        "count": COUNT,
        "p50-ms": described(OPTIONAL_COUNT, "To the next bound; null: above all bounds."),
        "p99-ms": OPTIONAL_COUNT,
    }
)
_SUBTASK = record(
    {
        "subtask": COUNT,
        "slot": COUNT,
        "records-in": COUNT,
        "records-out": described(COUNT, "To channels, as often as sent, and to sinks."),
        "bytes-in": BYTES,
        "bytes-out": BYTES,
        "time-ms": record(
            {
                "working": _SPENT,
                "turn": described(NUMBER, "Others of its slot had their turn."),
                "backpressured": described(NUMBER, "What it sends to had no room."),
                "held": described(NUMBER, "It waited for barriers."),
                "idle": described(NUMBER, "There was nothing to do."),
            }
        ),
        "watermark": described(
            nullable({"type": "integer"}),
            "Event time, in milliseconds since 1970.",
        ),
        "records-late": COUNT,
        "queued-bytes": BYTES,
        "state-rows": described(OPTIONAL_COUNT, "Of the last snapshot; null: not known."),
        "state-bytes": nullable(BYTES),
        "lag-records": described(OPTIONAL_COUNT, "There and not yet read; null: not known."),
        "lag-ms": nullable(MS),
        "latency": described(listing(_LATENCY), "Of markers on the way of records."),
        "aligning": nullable(_ALIGNING),
    }
)
FIGURES = record(
    {
        "attempt": COUNT,
        "tasks": listing(
            record(
                {
                    "id": ID,
                    "name": TEXT,
                    "operators": listing(record({"uid": TEXT, "name": TEXT})),
                    "subtasks": listing(_SUBTASK),
                }
            )
        ),
        "slots": listing(
            record(
                {
                    "slot": COUNT,
                    "host": OPTIONAL_TEXT,
                    "pid": OPTIONAL_COUNT,
                    "at": MOMENT,
                    "memory-bytes": BYTES,
                    "cpu-seconds": NUMBER,
                    "longest-step-ms": described(NUMBER, "Since the report before."),
                }
            )
        ),
        "window": _WINDOW,
    },
    optional=("window",),
    description="What slots have measured last; counts are since the attempt began.",
)
CONFIG = record(
    {
        "jid": ID,
        "name": TEXT,
        "execution-config": record(
            {
                "execution-mode": TEXT,
                "restart-strategy": TEXT,
                "job-parallelism": COUNT,
                "object-reuse-mode": FLAG,
                "user-config": described(mapping(TEXT), "The job's options."),
            }
        ),
        "versions": described(mapping(TEXT), "Of the driver, by package."),
    }
)

# --- failures ---

_RESTORED = record(
    {
        "id": COUNT,
        "restore_timestamp": MOMENT,
        "is_savepoint": FLAG,
        "external_path": OPTIONAL_TEXT,
    }
)
_FAILURE = record(
    {
        "exceptionName": TEXT,
        "stacktrace": described(TEXT, "The cause, in a sentence."),
        "timestamp": MOMENT,
        "taskName": OPTIONAL_TEXT,
        "endpoint": OPTIONAL_TEXT,
        "taskManagerId": OPTIONAL_TEXT,
        "failureLabels": mapping(TEXT),
        "concurrentExceptions": listing(TEXT),
        "function": described(OPTIONAL_TEXT, "The function, source or sink that raised."),
        "operator": described(OPTIONAL_TEXT, "The uid of the operator that called it."),
        "record": described(OPTIONAL_TEXT, "The record it was called with."),
        "traceback": described(OPTIONAL_TEXT, "The frames of the user's own code."),
        "attempt": COUNT,
        "permanent": described(FLAG, "Whether trying again would fail the same way."),
        "given-up": FLAG,
        "restart-delay-ms": nullable(MS),
        "recovered-by-attempt": OPTIONAL_COUNT,
        "recovered-at": nullable(MOMENT),
        "recovered-from": nullable(_RESTORED),
    }
)
EXCEPTIONS = record(
    {
        "root-exception": described(OPTIONAL_TEXT, "The newest."),
        "timestamp": nullable(MOMENT),
        "all-exceptions": listing(TEXT),
        "truncated": FLAG,
        "exceptionHistory": record({"entries": listing(_FAILURE), "truncated": FLAG}),
    }
)

# --- checkpoints ---

CHECKPOINT_CONFIG = record(
    {
        "mode": one_of("exactly_once", "at_least_once", "at_most_once", "stop_the_world"),
        "interval": described(nullable(MS), "null: checkpoints are taken when asked for only."),
        "timeout": MS,
        "min_pause": MS,
        "max_concurrent": COUNT,
        "externalization": record({"enabled": FLAG, "delete_on_cancellation": FLAG}),
        "state_backend": TEXT,
        "checkpoint_storage": OPTIONAL_TEXT,
        "unaligned_checkpoints": FLAG,
        "aligned_checkpoint_timeout": MS,
        "tolerable_failed_checkpoints": described(OPTIONAL_COUNT, "null: any number."),
        "checkpoints_after_tasks_finish": FLAG,
        "state_changelog_enabled": FLAG,
        "num_retained": COUNT,
    }
)
_SUMMARY = record(
    {
        name: NUMBER if name.startswith("p") else COUNT
        for name in ("min", "max", "avg", "p50", "p90", "p95", "p99", "p999")
    }
)
_FIGURES: dict[str, Schema] = {
    "latest_ack_timestamp": MOMENT,
    "checkpointed_size": described(BYTES, "Bytes that were written for it."),
    "state_size": described(BYTES, "Bytes of all files it needs, older ones included."),
    "end_to_end_duration": MS,
    "alignment_buffered": BYTES,
    "processed_data": described(
        BYTES, "Bytes of records that were taken between the first barrier and the last."
    ),
    "persisted_data": described(BYTES, "Bytes of records that a barrier overtook."),
    "num_subtasks": COUNT,
    "num_acknowledged_subtasks": COUNT,
}
_SENDER = described(
    nullable({"type": "array", "items": {"type": ["string", "integer"]}}),
    "The task by its name and the subtask, of the barrier that was waited for last.",
)
_DETAILS = described(
    one_of("all", "slowest"), "Whether all subtasks are remembered, or the three slowest only."
)
_TAKEN = described({"type": "number", "minimum": 0}, "Milliseconds.")
_PHASES: dict[str, Schema] = {
    "start": described(_TAKEN, "Barriers were under way."),
    "align": described(_TAKEN, "Some barriers had come and others were waited for."),
    "sync": _TAKEN,
    "async": _TAKEN,
    "store": described(_TAKEN, "Metadata and the entry in the job log were written."),
    "commit": described(nullable(_TAKEN), "After its duration: until all sinks had committed."),
}
_CHECKPOINT_WORDS = record(
    {
        "attempt": COUNT,
        "duration": _TAKEN,
        "phases": record(_PHASES, description="Along the critical path; together the duration."),
        "critical-path": described(
            listing({"type": "array", "items": {"type": ["string", "integer"]}}),
            "Task and subtask, from a source to the one that acknowledged last.",
        ),
        "slowest": nullable(
            record(
                {
                    "task": TEXT,
                    "subtask": COUNT,
                    "slot": OPTIONAL_COUNT,
                    "host": OPTIONAL_TEXT,
                    "waited-for": _SENDER,
                }
            )
        ),
        "details": _DETAILS,
    },
    description="What Flink has no field for.",
)
_CHECKPOINT_STATUS = one_of("IN_PROGRESS", "COMPLETED", "FAILED")
_TASK_FIGURES: dict[str, Schema] = {
    "id": COUNT,
    "name": TEXT,
    "status": _CHECKPOINT_STATUS,
    **_FIGURES,
}
CHECKPOINT = record(
    {
        "className": one_of("in_progress", "completed", "failed"),
        "id": COUNT,
        "status": _CHECKPOINT_STATUS,
        "is_savepoint": FLAG,
        "savepointFormat": OPTIONAL_TEXT,
        "trigger_timestamp": MOMENT,
        **_FIGURES,
        "checkpoint_type": one_of(
            "CHECKPOINT", "UNALIGNED_CHECKPOINT", "SAVEPOINT", "SYNC_SAVEPOINT"
        ),
        "tasks": mapping(record(_TASK_FIGURES)),
        "external_path": OPTIONAL_TEXT,
        "discarded": described(FLAG, "Whether its files are gone: it is not retained any more."),
        "failure_timestamp": nullable(MOMENT),
        "failure_message": OPTIONAL_TEXT,
        "stillframe": _CHECKPOINT_WORDS,
    },
    optional=("external_path", "discarded", "failure_timestamp", "failure_message"),
)
HELD = record(
    {
        "id": COUNT,
        "operators": listing(
            record(
                {
                    "uid": TEXT,
                    "states": described(listing(TEXT), "By name; of a database they are not told."),
                    "rows": described(OPTIONAL_COUNT, "Of them together."),
                    "bytes": described(BYTES, "Of all its files."),
                    "positions": described(
                        nullable(listing({"type": "object"})),
                        "Of a source: each split and where it is read from; null: very many.",
                    ),
                    "commits": described(
                        COUNT, "Of a sink: files or transactions that were ready for their commit."
                    ),
                }
            )
        ),
    }
)
CHECKPOINTS = record(
    {
        "counts": record(
            dict.fromkeys(("restored", "total", "in_progress", "completed", "failed"), COUNT),
            description="Since the job's very beginning, earlier drivers included.",
        ),
        "summary": record(
            dict.fromkeys(
                (
                    "checkpointed_size",
                    "state_size",
                    "end_to_end_duration",
                    "alignment_buffered",
                    "processed_data",
                    "persisted_data",
                ),
                _SUMMARY,
            )
        ),
        "latest": record(
            {
                "completed": nullable(CHECKPOINT),
                "savepoint": nullable(CHECKPOINT),
                "failed": nullable(CHECKPOINT),
                "restored": nullable(_RESTORED),
            }
        ),
        "history": described(listing(CHECKPOINT), "Newest first."),
        "stillframe": record(
            {"unreadable": described(listing(TEXT), "Files of the history that are passed over.")}
        ),
    }
)
SERIES = record(
    {
        "id": listing(COUNT),
        "triggered": listing(MOMENT),
        "status": described(TEXT, "A letter each: c completed, f failed, i in progress."),
        **{name: listing(schema) for name, schema in _PHASES.items()},
        "new": listing(BYTES),
        "full": listing(BYTES),
    },
    description="One value of each for every checkpoint, the oldest first.",
)
_SINCE = described(NUMBER, "Milliseconds since the trigger.")
BARRIERS = record(
    {
        "triggered": MOMENT,
        "details": _DETAILS,
        "subtasks": listing(
            record(
                {
                    "vertex": ID,
                    "index": COUNT,
                    "first": _SINCE,
                    "last": nullable(_SINCE),
                    "last_from": _SENDER,
                    "taken": _SINCE,
                    "durable": _SINCE,
                    "ack": _SINCE,
                    "arrivals": described(
                        listing({"type": "array", "items": {"type": ["string", "number"]}}),
                        "Task, subtask and when, in order; of the newest ten checkpoints.",
                    ),
                }
            )
        ),
    }
)
_MAYBE_MOMENT = nullable(MOMENT)
ATTEMPTS: Schema = listing(
    record(
        {
            "attempt": COUNT,
            "phases": record(
                {
                    "heard": described(_MAYBE_MOMENT, "The last word of what failed before it."),
                    "noticed": _MAYBE_MOMENT,
                    "begun": MOMENT,
                    "slots": described(_MAYBE_MOMENT, "All slots were there."),
                    "running": described(_MAYBE_MOMENT, "All had their state."),
                    "first_record": _MAYBE_MOMENT,
                    "caught_up": described(
                        _MAYBE_MOMENT, "Sources had read as far as they had been before."
                    ),
                }
            ),
            "restored": nullable(_RESTORED),
            "replayed": described(OPTIONAL_COUNT, "Records read once more; null: not known."),
            "ended": nullable(
                record(
                    {
                        "at": MOMENT,
                        "outcome": TEXT,
                        "kind": OPTIONAL_TEXT,
                        "reason": OPTIONAL_TEXT,
                    }
                )
            ),
        }
    )
)
_SUBTASK = record(
    {
        "className": one_of("completed", "pending"),
        "index": COUNT,
        "status": one_of("completed", "pending_or_failed"),
        "ack_timestamp": MOMENT,
        "end_to_end_duration": MS,
        "checkpointed_size": BYTES,
        "state_size": BYTES,
        "checkpoint": record({"sync": MS, "async": MS}),
        "alignment": record(
            {"buffered": BYTES, "processed": BYTES, "persisted": BYTES, "duration": MS}
        ),
        "start_delay": MS,
        "unaligned_checkpoint": FLAG,
        "aborted": FLAG,
        "stillframe": record(
            {
                "slot": OPTIONAL_COUNT,
                "host": OPTIONAL_TEXT,
                "pid": OPTIONAL_COUNT,
                "last_barrier": nullable(described(NUMBER, "Milliseconds since the trigger.")),
                "last_from": _SENDER,
            }
        ),
    },
    optional=(
        "ack_timestamp",
        "end_to_end_duration",
        "checkpointed_size",
        "state_size",
        "checkpoint",
        "alignment",
        "start_delay",
        "unaligned_checkpoint",
        "aborted",
        "stillframe",
    ),
)
SUBTASKS = record(
    {
        **_TASK_FIGURES,
        "summary": record(
            {
                "checkpointed_size": _SUMMARY,
                "state_size": _SUMMARY,
                "end_to_end_duration": _SUMMARY,
                "checkpoint_duration": record({"sync": _SUMMARY, "async": _SUMMARY}),
                "alignment": record(
                    dict.fromkeys(("buffered", "processed", "persisted", "duration"), _SUMMARY)
                ),
                "start_delay": _SUMMARY,
            }
        ),
        "subtasks": listing(_SUBTASK),
    }
)

# --- what is in a checkpoint ---

_ANY: Schema = {}
STATE: Schema = {
    "anyOf": [
        record(
            {
                "checkpoint": COUNT,
                "states": listing(
                    record(
                        {
                            "uid": TEXT,
                            "operator": TEXT,
                            "state": TEXT,
                            "rows": described(OPTIONAL_COUNT, "null: nobody has counted them."),
                            "bytes": BYTES,
                        }
                    )
                ),
            }
        ),
        record(
            {
                "checkpoint": COUNT,
                "uid": TEXT,
                "operator": TEXT,
                "state": TEXT,
                "key": OPTIONAL_TEXT,
                "key_group": OPTIONAL_COUNT,
                "subtask": described(OPTIONAL_COUNT, "That has the key."),
                "rows": listing(mapping(_ANY)),
                "more": FLAG,
            }
        ),
    ]
}

# --- the log ---

LOGS = record(
    {
        "lines": listing(
            record(
                {
                    "number": COUNT,
                    "at": MOMENT,
                    "level": TEXT,
                    "slot": described(OPTIONAL_COUNT, "null: the driver."),
                    "attempt": OPTIONAL_COUNT,
                    "checkpoint": OPTIONAL_COUNT,
                    "task": OPTIONAL_TEXT,
                    "text": TEXT,
                }
            )
        ),
        "more": described(FLAG, "Whether there are older ones: ask with before."),
    }
)

# --- operations ---

_FAILURE_CAUSE = record({"class": TEXT, "stack-trace": described(TEXT, "In a sentence.")})


def operation_shape(result: dict[str, Schema], failure_field: str) -> Schema:
    """What became of it: nothing yet, its result, or why there is none."""
    failed = record({failure_field: _FAILURE_CAUSE})
    return record(
        {
            "status": record({"id": one_of("IN_PROGRESS", "COMPLETED")}),
            "operation": {"anyOf": [record(result), failed, {"type": "null"}]},
        }
    )


CHECKPOINT_OPERATION = operation_shape({"checkpointId": COUNT}, "failureCause")
SAVEPOINT_OPERATION = operation_shape(
    {"location": described(OPTIONAL_TEXT, "null: the job was stopped without one.")},
    "failure-cause",
)
RESCALING_OPERATION = operation_shape(
    {"parallelism-before": COUNT, "parallelism": COUNT, "downtime-ms": MS}, "failure-cause"
)
DIFFERENCE_OPERATION = operation_shape(
    {
        "a": TEXT,
        "b": TEXT,
        "states": listing(
            record(
                {
                    "uid": TEXT,
                    "operator": TEXT,
                    "state": TEXT,
                    "only_in": OPTIONAL_TEXT,
                    "added": COUNT,
                    "changed": COUNT,
                    "gone": COUNT,
                    "same": COUNT,
                    "examples": listing(mapping(_ANY)),
                }
            )
        ),
    },
    "failure-cause",
)
