"""How settings are written: text from an option or a variable in, a checked value out. Pure: no I/O, no torch.

Every parser takes the setting with its origin, so that an error can say which option or variable to change.
"""

from __future__ import annotations

import difflib
import math
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from elastictrain.errors import ConfigError

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_SECONDS_PER_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_STEPS = re.compile(r"(\d+) ?steps?")
# What nobody should have written there, and what no message should repeat.
_HIDDEN = re.compile(r"\b(secret|password)\s*=[^,]*")
_STREAMS = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")
# The kernel delivers these two to no handler.
_UNCATCHABLE = frozenset({"SIGKILL", "SIGSTOP"})


@dataclass(frozen=True, slots=True)
class Given:
    """One setting as the user gave it.

    `option` is its name on the command line (`--nnodes`), `text` what was given, `origin` where: "command line",
    a variable's name, "run.json" or "default".
    """

    option: str
    text: str
    origin: str = "command line"

    def error(self, *, expected: str, fix: str) -> ConfigError:
        """Build (not raise) the error of a value that cannot be used."""
        place = "" if self.origin == "command line" else f" (from {self.origin})"
        return ConfigError(
            f"{self.option}: expected {expected}, seen {self.text!r}{place}; {fix}", field=self.option, seen=self.text
        )


@dataclass(frozen=True, slots=True)
class CheckpointEvery:
    """When to checkpoint: by measured cost (`auto`), every `value` seconds, or every `value` steps."""

    kind: Literal["auto", "seconds", "steps"] = "auto"
    value: float = 0.0

    def __post_init__(self) -> None:
        if self.kind != "auto" and not (math.isfinite(self.value) and self.value > 0):
            raise ConfigError(
                f"--checkpoint-every: expected more than 0 {self.kind}, seen {self.value}; give e.g. 30s or 500steps",
                field="--checkpoint-every",
                seen=self.value,
            )

    def __str__(self) -> str:
        match self.kind:
            case "auto":
                return "auto"
            case "seconds":
                return f"{self.value:g}s"
            case "steps":
                return f"{int(self.value)}steps"


def closest(word: str, known: Iterable[str]) -> str | None:
    """Give the known word that was most likely meant: one that continues `word`, else one spelled alike."""
    words = sorted(set(known), key=lambda candidate: (len(candidate), candidate))
    if len(word.strip("-")) >= 3:
        for candidate in words:
            if candidate.startswith(word):
                return candidate
    alike = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return alike[0] if alike else None


def read_count(given: Given, *, minimum: int, maximum: int | None = None, example: int) -> int:
    """Read a whole number within bounds. Raises ConfigError."""
    span = f"a whole number from {minimum}" + (" up" if maximum is None else f" to {maximum}")
    try:
        value = int(given.text)
    except ValueError:
        raise given.error(expected=span, fix=f"give e.g. {given.option} {example}") from None
    if value < minimum or (maximum is not None and value > maximum):
        raise given.error(expected=span, fix=f"give e.g. {given.option} {example}")
    return value


def read_seconds(given: Given, *, example: str) -> float:
    """Read a duration of zero or more seconds: `30`, `2.5`, `30s`, `5m`. Raises ConfigError."""
    seconds = _seconds(given.text if _DURATION.fullmatch(given.text) else f"{given.text}s")
    if seconds is None:
        raise given.error(expected="a duration in seconds", fix=f"give e.g. {given.option} {example}")
    return seconds


def _seconds(text: str) -> float | None:
    match = _DURATION.fullmatch(text)
    return None if match is None else float(match[1]) * _SECONDS_PER_UNIT[match[2]]


def read_flag(given: Given) -> bool:
    """Read a flag's variable: 1 is on, 0 is off, as torchrun does. Raises ConfigError."""
    try:
        return bool(int(given.text))
    except ValueError:
        raise given.error(expected="1 or 0", fix="set the variable to 1 or 0, or unset it") from None


def read_nodes(given: Given) -> tuple[int, int]:
    """Read `N` or `MIN:MAX` as (min, max) nodes. Raises ConfigError."""
    expected = "a number of nodes N, or MIN:MAX with 1 <= MIN <= MAX"
    try:
        bounds = [int(part) for part in given.text.split(":")]
    except ValueError:
        raise given.error(expected=expected, fix="give --nnodes 1") from None
    if len(bounds) > 2 or not 1 <= bounds[0] <= bounds[-1]:
        swapped = len(bounds) == 2 and bounds[0] > bounds[1] >= 1
        fix = f"did you mean {bounds[1]}:{bounds[0]}?" if swapped else "give --nnodes 1"
        raise given.error(expected=expected, fix=fix)
    return bounds[0], bounds[-1]


def read_checkpoint_every(given: Given) -> CheckpointEvery:
    """Read `auto`, a duration with its unit (`30s`, `5m`) or a number of steps (`500steps`). Raises ConfigError."""
    text = given.text.strip().lower()
    if text == "auto":
        return CheckpointEvery()
    steps = _STEPS.fullmatch(text)
    seconds = _seconds(text)
    value = float(steps[1]) if steps else seconds
    if value is None or value <= 0:
        raise given.error(
            expected="auto, a duration such as 30s or 5m, or a number of steps such as 500steps",
            fix=f"did you mean {text}s or {text}steps?" if text.isdecimal() and int(text) else "give the unit",
        )
    return CheckpointEvery("steps" if steps else "seconds", value)


def read_streams(given: Given) -> str:
    """Check torchrun's notation of streams: `3`, or `0:1,1:2` by local rank (0 none, 1 stdout, 2 stderr, 3 both)."""
    if not _STREAMS.fullmatch(given.text):
        raise given.error(
            expected="0 (none), 1 (stdout), 2 (stderr), 3 (both), or LOCAL_RANK:STREAM pairs such as 0:3,1:2",
            fix=f"give e.g. {given.option} 3",
        )
    return given.text


def read_ranks(given: Given) -> tuple[int, ...] | None:
    """Read comma-separated local ranks; None where nothing was given. Raises ConfigError."""
    if not given.text:
        return None
    try:
        ranks = sorted({int(part) for part in given.text.split(",")})
    except ValueError:
        ranks = [-1]
    if ranks[0] < 0:
        raise given.error(expected="local ranks such as 0,1,2", fix=f"give e.g. {given.option} 0")
    return tuple(ranks)


def read_filters(given: Given) -> tuple[str, ...]:
    """Read comma-separated words; a doubled comma stands for one inside a word."""
    if not given.text:
        return ()
    return tuple(word.replace("\0", ",") for word in given.text.replace(",,", "\0").split(","))


def read_signals(given: Given) -> tuple[str, ...]:
    """Read comma-separated signal names that a process can handle. Raises ConfigError."""
    names = [word.strip().upper() for word in given.text.split(",") if word.strip()]
    known = signal.Signals.__members__.keys() - _UNCATCHABLE
    for name in names:
        if name not in known:
            meant = closest(name, known)
            raise given.error(
                expected="names of signals that can be handled, such as SIGTERM,SIGUSR1",
                fix=f"{name} is not one" + (f": did you mean {meant}?" if meant else ""),
            )
    return tuple(dict.fromkeys(names))


def read_pairs(given: Given) -> dict[str, str]:
    """Read `key=value,key=value`. Raises ConfigError."""
    pairs: dict[str, str] = {}
    for part in given.text.split(",") if given.text.strip() else ():
        key, _, value = (word.strip() for word in part.partition("="))
        if not key or not value:
            text = _HIDDEN.sub(r"\1=***", given.text)
            hidden = Given(given.option, text, given.origin)
            raise hidden.error(expected="KEY=VALUE,KEY=VALUE", fix=f"{_HIDDEN.sub('***', part)!r} is no such pair")
        pairs[key] = value
    return pairs


def read_choice(given: Given, choices: Iterable[str]) -> str:
    """Read one of a closed set of words. Raises ConfigError."""
    words = tuple(choices)
    if given.text not in words:
        meant = closest(given.text, words)
        raise given.error(
            expected=f"one of {', '.join(words)}",
            fix=f"did you mean {meant}?" if meant else f"give e.g. {given.option} {words[0]}",
        )
    return given.text
