"""`python -m stillframe`: the same as the command `stillframe`."""

from __future__ import annotations

import sys

from stillframe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
