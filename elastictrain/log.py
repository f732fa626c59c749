"""Lines for people: one logger tree, one line per record on stderr, and logging on change.

Library code only asks for a logger; the handler is added by the command line alone, and the root logger is never
touched. What programs read is the ledger, and what alerts read is the metrics.
"""

from __future__ import annotations

import logging
import sys
import time

NAMESPACE = "elastictrain"
LEVELS = ("debug", "info", "warning", "error")


def get_logger(name: str) -> logging.Logger:
    """Give the logger of a module; `name` is its `__name__`."""
    return logging.getLogger(name if name == NAMESPACE or name.startswith(f"{NAMESPACE}.") else f"{NAMESPACE}.{name}")


class LineFormatter(logging.Formatter):
    """`[elastictrain] 12:03:44 WARNING message`, with the prefix on every line of a long message or traceback.

    Records carry no module or thread: the reader is a person who trains a model. INFO is not spelled out.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        prefix = f"[elastictrain] {time.strftime('%H:%M:%S', time.localtime(record.created))} {level}"
        return "\n".join(prefix + line for line in (text.splitlines() or [""]))


class StderrHandler(logging.Handler):
    """Writes each record to the present `sys.stderr` in one call, so that lines of other processes do not cut it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            # The terminal or pipe is gone: training goes on without a reader.
            pass


def configure_logging(level: str = "info") -> None:
    """Send the records of our loggers from `level` up to stderr; calling it again only changes the level."""
    logger = logging.getLogger(NAMESPACE)
    logger.setLevel(level.upper())
    logger.propagate = False
    if not any(isinstance(handler, StderrHandler) for handler in logger.handlers):
        handler = StderrHandler()
        handler.setFormatter(LineFormatter())
        logger.addHandler(handler)


class ChangeLog:
    """Logs what a subject is in only when that changes, so that a wait of an hour is one line.

    Not for several threads: each owner has its own.
    """

    def __init__(self, logger: logging.Logger, level: int = logging.INFO) -> None:
        self._logger = logger
        self._level = level
        self._last: dict[str, str] = {}

    def note(self, subject: str, reason: str) -> bool:
        """Log `reason` unless it is the last one noted of `subject`; tell whether it was logged."""
        if self._last.get(subject) == reason:
            return False
        self._last[subject] = reason
        self._logger.log(self._level, "%s", reason)
        return True

    def forget(self, subject: str) -> None:
        """Make the next `note` of `subject` log whatever it says."""
        self._last.pop(subject, None)
