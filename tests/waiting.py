"""Waiting in tests: for a condition, with a named limit, never for a fixed time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_PAUSE_S = 0.01


def wait_until(predicate: Callable[[], T], timeout_s: float = 10.0, describe: Callable[[], object] | str = "") -> T:
    """Block until `predicate()` is true and give its value.

    Raises AssertionError after `timeout_s` with `describe` (a text, or a function called then) and the last value.
    """
    until_s = time.monotonic() + timeout_s
    pause = threading.Event()  # a wait that a signal handler or another thread may cut short
    while not (value := predicate()):
        if time.monotonic() >= until_s:
            state = describe() if callable(describe) else describe
            raise AssertionError(f"not within {timeout_s} s: last value {value!r}; {state}")
        pause.wait(_PAUSE_S)
    return value
