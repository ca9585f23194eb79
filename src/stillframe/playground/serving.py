"""The requests of the playground beside those of a driver: the board, the buttons, the tour.

What takes longer than a request is begun by it and done on a thread, one thing at a time: a second
one is refused while the first is under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from stillframe.cli.lines import in_one_sentence
from stillframe.errors import StillframeError
from stillframe.json_values import JsonObject
from stillframe.playground import breaking
from stillframe.playground.checkpoints import JOB
from stillframe.playground.following import Left
from stillframe.playground.steps import SLOW, STEPS, poison_ahead
from stillframe.playground.supervisor import Supervisor
from stillframe.playground.tour import Tour
from stillframe.rest.control import Call
from stillframe.rest.refusals import Refused
from stillframe.rest.routes import Route
from stillframe.rest.schemas import one_of, record

_MODES = ("exactly-once", "at-least-once")
_ANY: JsonObject = {"type": "object"}
_WHOLE: JsonObject = {"type": "integer", "minimum": 0, "maximum": 64}


class Buttons:
    """Does one thing at a time. Every member may be used from any thread."""

    def __init__(self, play: Supervisor) -> None:
        self.play = play
        self.tour = Tour(play, STEPS)
        self.busy: str | None = None
        self.last: JsonObject | None = None
        self._lock = threading.Lock()

    def routes(self) -> tuple[Route, ...]:
        """For the table of requests."""
        action = record(
            {
                "action": one_of(*self._actions({})),
                "slot": _WHOLE,
                "seconds": {"type": "number", "minimum": 0, "maximum": 45},
                "mode": one_of(*_MODES),
                "parallelism": {"type": "integer", "minimum": 1, "maximum": 4},
            },
            optional=("slot", "seconds", "mode", "parallelism"),
        )
        number = {"type": "integer", "minimum": 1, "maximum": len(STEPS)}
        steps = record({"step": number, "from": number}, optional=("step", "from"))
        return (
            Route("GET", "/playground", "The board, the faults and the tour", self._state, _ANY),
            Route("POST", "/playground/actions", "Break something, or mend it", self._act, _ANY,
                  202, body=action),
            Route("POST", "/playground/tour", "Run a step of the tour, or all from one on",
                  self._run_steps, _ANY, 202, body=steps),
        )  # fmt: skip

    # --- answers ---

    def _state(self, call: Call) -> JsonObject:
        now, score = self.play.now, self.play.score
        return {
            "job": JOB,
            "score": None if score is None else score.to_json(),
            "prediction": self._prediction(),
            "faults": self.play.faults,
            "settings": asdict(self.play.settings),
            "slots": list(now.pids),
            "driver": now.driver,
            "attempt": now.attempt,
            "executor_off": self.play.no_executor,
            "failure": now.failure,
            "tour": self.tour.to_json(),
            "busy": self.busy,
            "last": self.last,
        }

    def _prediction(self) -> JsonObject | None:
        try:
            found = self.play.predict()
        except StillframeError:
            return None
        return {**asdict(found), "sentence": found.sentence}

    def _act(self, call: Call) -> JsonObject:
        name = str(call.body["action"])
        self._begin(name, self._actions(call.body)[name])
        return {}

    def _run_steps(self, call: Call) -> JsonObject:
        if "step" in call.body:
            numbers = [int(call.body["step"])]
        else:
            numbers = list(range(int(call.body.get("from", 1)), len(STEPS) + 1))
        self._begin("tour", lambda: self._run(numbers))
        return {}

    def _run(self, numbers: list[int]) -> str:
        results = [result for _, result in self.tour.run(numbers) if result is not None]
        right = sum(result.is_right for result in results)
        return f"{right} of {len(results)} steps came out as predicted"

    def _actions(self, given: Mapping[str, Any]) -> dict[str, Callable[[], object]]:
        play = self.play
        slot, seconds = int(given.get("slot", 1)), float(given.get("seconds", 8))
        return {
            "checkpoint": lambda: f"checkpoint {play.checkpoint()} is complete",
            "kill_slot": lambda: breaking.kill_slot(play, slot).prediction.sentence,
            "kill_executor": lambda: f"executor {breaking.kill_executor(play)} was killed",
            "freeze_slot": lambda: f"pid {breaking.freeze_slot(play, slot, seconds)} stands still",
            "kill_driver": lambda: f"driver {breaking.kill_driver(play)} was killed",
            "flip_byte": lambda: f"one byte of {breaking.flip_byte(play)} is another",
            "flip_back": lambda: breaking.flip_back(play),
            "poison": lambda: play.set_faults(poison=poison_ahead(play)),
            "slow_channel": lambda: play.set_faults(delay=SLOW),
            "full_disk": lambda: play.set_faults(full_disk=True),
            "heal": lambda: play.set_faults(poison=None, delay=None, full_disk=None),
            "mode": lambda: play.change(mode=given.get("mode", _MODES[0])),
            "rescale": lambda: play.rescale(int(given.get("parallelism", 3))),
            "upgrade": lambda: play.change(version=2),
        }

    def _begin(self, name: str, do: Callable[[], object]) -> None:
        with self._lock:
            if self.busy is not None:
                raise Refused(409, f"{self.busy} is under way: wait until it is done")
            self.busy = name
        threading.Thread(target=self._do, args=(name, do), daemon=True).start()

    def _do(self, name: str, do: Callable[[], object]) -> None:
        try:
            text, failed = str(do() or "done"), False
        except Left:
            text, failed = "left", False
        except Exception as error:  # whatever it is: whoever has pressed the button is told
            text, failed = in_one_sentence(error), True
        self.last = {"action": name, "text": text, "failed": failed}
        self.busy = None
