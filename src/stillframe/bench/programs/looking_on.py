"""Those who look at a job while it is measured: pages that are open, and one who asks for keys.

    python looking_on.py '{"job": "latency", "pages": 5, "lookups": true}'

Runs until it is ended. What it was told is counted, and told when it is: `{"told": 123}`.
"""

import http.client
import json
import signal
import sys
import threading
import time
from urllib.parse import urlsplit

from stillframe.rest.registry import registered_jobs

_RETRY_SECONDS = 0.1
told = 0


def registered(name):
    while True:
        found = [job for job in registered_jobs() if job.name == name]
        if found:
            return found[0]
        time.sleep(_RETRY_SECONDS)


def answer_of(job, path):
    """Open, to be read."""
    connection = http.client.HTTPConnection(urlsplit(job.url).netloc, timeout=60)
    headers = {"Authorization": f"Bearer {job.token}"}
    connection.request("GET", f"/jobs/{job.jid}{path}", headers=headers)
    return connection.getresponse()


def follow(name):
    """As an open page does."""
    answer = answer_of(registered(name), "/events")
    while line := answer.readline():
        note(line.startswith(b"event:"))


def look_up(name):
    """One key after the other; refused while there is no checkpoint."""
    job = registered(name)
    for number in range(sys.maxsize):
        answer = answer_of(job, f"/state?uid=count&key=app-{number % 1000}")
        answer.read()
        note(answer.status == 200)
        if answer.status != 200:
            time.sleep(_RETRY_SECONDS)


def note(is_told):
    global told
    told += is_told


def main():
    asked = json.loads(sys.argv[1])
    eyes = [follow] * asked["pages"] + [look_up] * asked["lookups"]
    for each in eyes:
        threading.Thread(target=each, args=(asked["job"],), daemon=True).start()
    signal.sigwait({signal.SIGTERM})
    print(json.dumps({"told": told}), flush=True)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    main()
