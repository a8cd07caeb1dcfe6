"""A variant of ``rope.apply`` that waits, and counts how often: what a profile must find."""

from __future__ import annotations

import time
from typing import Any

from dayzero.ops.rope import apply

SECONDS = 0.02
calls = 0


def waiting(*args: Any, **kwargs: Any) -> Any:
    global calls
    calls += 1
    time.sleep(SECONDS)
    return apply.body(*args, **kwargs)
