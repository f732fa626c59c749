"""What every test gets: a mark on the processes it starts, and a check that it leaves nothing behind."""

from __future__ import annotations

import gc
import itertools
import multiprocessing.resource_tracker
import os
from collections.abc import Iterator

import pytest
from leaks import TEST_ID_VARIABLE, find_leaks, take_holdings
from waiting import wait_until

__all__ = ["wait_until"]

_numbers = itertools.count(1)
# A killed process is gone a moment after the kill returns.
_PATIENCE_S = 3.0


@pytest.fixture(scope="session", autouse=True)
def resource_tracker() -> None:
    """Start Python's own tracker of shared memory first: it lives as long as this process and is no leak."""
    multiprocessing.resource_tracker.ensure_running()


@pytest.fixture(autouse=True)
def leaves_nothing_behind(resource_tracker: None) -> Iterator[str]:
    """Fail a test that leaves a process, a port, a descriptor, shared memory or a namespace; give the test's mark."""
    test_id = f"{os.getpid()}-{next(_numbers)}"
    before = take_holdings()
    outer = os.environ.get(TEST_ID_VARIABLE)
    os.environ[TEST_ID_VARIABLE] = test_id
    try:
        yield test_id
    finally:
        if outer is None:
            os.environ.pop(TEST_ID_VARIABLE, None)
        else:
            os.environ[TEST_ID_VARIABLE] = outer
    leaks = find_leaks(before, test_id)
    if leaks:
        gc.collect()  # objects in reference cycles close what they hold only now
        try:
            wait_until(lambda: not find_leaks(before, test_id), _PATIENCE_S)
        except AssertionError:
            pytest.fail("the test left behind:\n  " + "\n  ".join(find_leaks(before, test_id) or leaks), pytrace=False)
