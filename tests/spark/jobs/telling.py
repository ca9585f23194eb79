"""How jobs under spark-submit tell a test what happens: one JSON line for each event."""

import json


def say(**line):
    print("EVENT " + json.dumps(line), flush=True)


def tell(event):
    said = {"kind": type(event).__name__, "text": str(event)}
    if hasattr(event, "pids"):
        said["pids"] = event.pids
    say(**said)


def tell_of(query):
    """All that happens from now on, and which slots run already."""
    query.add_listener(tell)
    if query.slot_pids:
        say(kind="SlotsRunning", pids=query.slot_pids)
