"""Classes that msgspec converts to are ready when their module is imported."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys, threading, msgspec
from stillframe.protocol.kept import _KINDS
from stillframe.protocol.measures import Measured
from stillframe.protocol.messages import Said
sys.setswitchinterval(1e-6)
for kind in (Measured, Said, *_KINDS.values()):
    together = threading.Barrier(6)
    def convert():
        together.wait()
        try:
            msgspec.convert({"none": 0}, kind)
        except msgspec.ValidationError:
            pass
    threads = [threading.Thread(target=convert) for _ in range(6)]
    for each in threads: each.start()
    for each in threads: each.join()
"""


def test_threads_that_convert_for_the_first_time_at_once_do_not_end_the_process():
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
