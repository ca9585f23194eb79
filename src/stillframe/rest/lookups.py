"""Looks into checkpoints in a process of its own: a large state must not take the driver's
interpreter, nor its memory.

One at a time, behind everything else that wants the processor, and not for long.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from stillframe.json_values import JsonObject
from stillframe.rest.refusals import Refused

SECONDS_MAX = 60.0
_ANSWER_BYTES_MAX = 256 << 10


class Lookups:
    """Of one server. Every member may be used from any thread."""

    def __init__(self, seconds_max: float = SECONDS_MAX) -> None:
        self._lock = threading.Lock()
        self._seconds_max = seconds_max

    def run(
        self, command: Sequence[str], settings: Mapping[str, str], wait_seconds: float = 0.0
    ) -> JsonObject:
        """What the command `stillframe` says as JSON; `settings`: how the storage is reached.

        Waits so long for another one to end.
        """
        if not self._lock.acquire(timeout=wait_seconds):
            raise Refused(
                429, "somebody looks into a checkpoint now: ask again soon", {"Retry-After": "1"}
            )
        try:
            return self._run(command, settings)
        finally:
            self._lock.release()

    def _run(self, command: Sequence[str], settings: Mapping[str, str]) -> JsonObject:
        niced = [nice, "-n", "10"] if (nice := shutil.which("nice")) is not None else []
        process = subprocess.Popen(
            [*niced, sys.executable, "-m", "stillframe", *command, "--json", "--settings-on-stdin"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # What is imported here may have come by other ways than the environment.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        with process:
            try:
                given = json.dumps(dict(settings)).encode()
                said, complained = process.communicate(given, self._seconds_max)
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise Refused(
                    503,
                    f"looking into the checkpoint took longer than {self._seconds_max:g} s: use"
                    f" the command stillframe {command[0]}, which has all the time it needs",
                ) from error
        if not said:
            lines = complained.decode(errors="replace").strip().splitlines()
            sentence = lines[-1].removeprefix("stillframe: ") if lines else "nobody says why"
            raise Refused(409, sentence)
        if len(said) > _ANSWER_BYTES_MAX:
            raise Refused(
                409,
                f"that is {len(said)} bytes, more than can be shown here: use the command"
                f" stillframe {command[0]}",
            )
        answer: JsonObject = json.loads(said)
        return answer
