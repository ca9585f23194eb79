"""How many examples hypothesis draws for a test."""

import os


def tries(in_soak: int) -> int:
    """All in `make soak`; a quarter in `make test`, others each time."""
    return in_soak if "STILLFRAME_SOAK" in os.environ else in_soak // 4
