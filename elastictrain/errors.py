"""The error tree, by who must act.

    ElasticTrainError
    ├─ ConfigError               the user: a wrong option, file or call               exit code 2
    ├─ RendezvousError           the control plane
    │  ├─ RendezvousClosedError     the run is over
    │  ├─ RendezvousTimeoutError    not enough nodes or workers in time
    │  └─ StoreError                the store did not answer (retryable) or holds nonsense (not)
    ├─ WorkerError               a training process ended, hung or lost its agent
    ├─ CheckpointError           nothing found, nothing intact, or a state that cannot be stored
    ├─ DataError                 the data set does not fit the run, or failed on one sample
    └─ InternalError             our bug: carries the last transitions and asks for a report
    Signal                       not an error: control flow inside a worker
    └─ StepAborted                  the attempt is undone and tried again

Every message says what was expected, what was seen and what to do. Facts are attributes as well as text.
"""

from __future__ import annotations


class ElasticTrainError(Exception):
    """Root of all errors that elastictrain raises on purpose."""

    exit_code: int = 1
    retryable: bool = False


class ConfigError(ElasticTrainError):
    """The user must change an option, a file or a call; retrying cannot help.

    `field` is the option or argument, `seen` its value, where they are known.
    """

    exit_code = 2

    def __init__(self, message: str, *, field: str | None = None, seen: object = None) -> None:
        super().__init__(message)
        self.field = field
        self.seen = seen


class RendezvousError(ElasticTrainError):
    """The nodes of the run could not agree on a Round."""


class RendezvousClosedError(RendezvousError):
    """The run is over: nobody can join it any more."""


class RendezvousTimeoutError(RendezvousError):
    """Fewer members than the minimum arrived before the named deadline."""


class StoreError(RendezvousError):
    """The store failed; `retryable` tells whether waiting can help."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class WorkerError(ElasticTrainError):
    """A training process ended with a failure, or a worker lost its agent."""


class CheckpointError(ElasticTrainError):
    """No intact checkpoint, or a state that cannot be stored or loaded; `path` names the file where known."""

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class DataError(ElasticTrainError):
    """The data set does not fit the run (length, emptiness), or failed on one sample (`index`)."""

    def __init__(self, message: str, *, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class InternalError(ElasticTrainError):
    """A bug of elastictrain. `story` holds the last transitions that led here."""

    def __init__(self, message: str, *, story: tuple[str, ...] = ()) -> None:
        tail = "".join(f"\n  {line}" for line in story)
        super().__init__(f"{message} (a bug of elastictrain; please report it with these last transitions){tail}")
        self.story = story


class Signal(BaseException):
    """Root of control flow that user code should not catch; never leaves a `with step` block."""


class StepAborted(Signal):
    """The attempt at a step was undone because the generation ended; it is tried again."""
