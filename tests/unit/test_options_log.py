"""Lines for people: our logger only, a prefix on each line, and no line twice for one state."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from elastictrain.log import ChangeLog, configure_logging, get_logger


@pytest.fixture(autouse=True)
def our_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("elastictrain")
    before = (logger.level, logger.propagate, list(logger.handlers))
    yield logger
    logger.level, logger.propagate, logger.handlers[:] = before


def test_line_has_a_prefix_when_logged(capsys: pytest.CaptureFixture[str]) -> None:
    root_handlers = list(logging.getLogger().handlers)
    configure_logging("info")
    configure_logging("info")
    get_logger("elastictrain.agent.policy").info("worker %d is warm", 3)
    get_logger("other").warning("first\nsecond")
    get_logger("elastictrain").debug("not shown")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("[elastictrain] ") for line in lines)
    assert lines[0].endswith(" worker 3 is warm")
    assert lines[2].endswith(" WARNING second")
    assert logging.getLogger().handlers == root_handlers


def test_training_goes_on_when_stderr_cannot_be_written() -> None:
    code = (
        "from elastictrain.log import configure_logging, get_logger\n"
        "configure_logging(); get_logger('elastictrain').error('nobody reads this'); print('training goes on')"
    )
    with open("/dev/full", "w", encoding="utf-8") as full:
        outcome = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, text=True)
    assert outcome.stdout == "training goes on\n"


def test_reason_is_logged_once_when_it_does_not_change(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    changes = ChangeLog(get_logger("elastictrain"))
    noted = [
        changes.note("round", reason) for reason in ("1 of 2 workers", "1 of 2 workers", "ready", "1 of 2 workers")
    ]
    assert noted == [True, False, True, True]
    changes.forget("round")
    assert changes.note("round", "1 of 2 workers")
    assert changes.note("store", "1 of 2 workers")
    assert len(capsys.readouterr().err.splitlines()) == 5
