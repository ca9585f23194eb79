"""`stillframe history ROOT`: all jobs below a checkpoint location over HTTP, also those that nobody
runs."""

from __future__ import annotations

import argparse
import json
import threading

from stillframe.rest.history_server import HistoryServer
from stillframe.rest.serving import chosen_token


def history(arguments: argparse.Namespace) -> int:
    """Until it is interrupted."""
    forward = frozenset(host.lower() for host in arguments.forward)
    server = HistoryServer(arguments.root, arguments.port, chosen_token(), forward)
    try:
        address = f"{server.url}/#token={server.token}"
        if arguments.json:
            print(json.dumps({"url": server.url, "token": server.token}), flush=True)
        else:
            print(f"{arguments.root} is shown at {address} until Ctrl-C", flush=True)
        threading.Event().wait()
    except KeyboardInterrupt:
        return 0
    finally:
        server.close()
    return 0
