"""`elastictrain.init()`: a training process joins the run that its agent started it for."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final

import torch

from elastictrain.channel import Channel, worker_channel
from elastictrain.config import CHANNEL_FD_VARIABLE, WORKER_ID_VARIABLE
from elastictrain.errors import ConfigError, WorkerError
from elastictrain.priority import set_own_oom_score
from elastictrain.worker.collectives import Communicator
from elastictrain.worker.control import Control
from elastictrain.worker.run import Run

NO_AGENT: Final = (
    "init() found no agent: start the script with `elastictrain run script.py`, or from Python with "
    "elastictrain.launch(fn)"
)

_run: Run | None = None


def init() -> Run:
    """Join the run: rank, world size, device. Calls no collective; waits only for the agent's welcome.

    A spare has come this far, with all that the script does before this call, and waits here until it takes the place
    of a lost worker. Read LOCAL_RANK after this call, or use `run.local_rank`: before it a spare has none.
    Returns the same Run when called again. Raises ConfigError when the process was not started by an agent, WorkerError
    when the agent does not answer.
    """
    global _run
    if _run is None:
        channel = _channel_from_environment()
        comm = Communicator(torch.device("cpu"))
        control = Control(channel, comm)
        if control.start():
            _check_spare()
            welcome = control.wait_welcome()
            _take_place(welcome, channel.streams)
        else:
            welcome = control.wait_welcome()
        comm.use_device(_device())
        _run = Run(control=control, comm=comm, welcome=welcome, worker_id=os.environ[WORKER_ID_VARIABLE])
        atexit.register(_run.finish)
        _report_uncaught(_run)
        os.register_at_fork(after_in_child=lambda: _leave_in_child(channel, comm))
    return _run


def _report_uncaught(run: Run) -> None:
    """Tell the agent about the exception that ends this process, with rank and step, before it is printed."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            text = "".join(traceback.format_exception(kind, error, trace))
            report_exception(run._control.channel, error, text, run=run)
            run.abandon()
        previous(kind, error, trace)

    sys.excepthook = hook


def report_exception(channel: Channel, error: BaseException, text: str, *, run: Run | None) -> None:
    """Send the agent the exception that ends this worker; `text` is its traceback."""
    channel.send(
        "exception",
        error_type=type(error).__name__,
        message=str(error),
        traceback=text,
        rank=run.rank if run is not None else None,
        step=run.step if run is not None and run.generation else None,
        is_config=isinstance(error, ConfigError),
    )


def current_run() -> Run | None:
    """The Run of this process, if it has joined one."""
    return _run


def _channel_from_environment() -> Channel:
    text = os.environ.get(CHANNEL_FD_VARIABLE, "")
    if not text.isdigit() or WORKER_ID_VARIABLE not in os.environ:
        raise ConfigError(NO_AGENT)
    try:
        channel = worker_channel(int(text))
    except OSError:
        raise ConfigError(
            f"{CHANNEL_FD_VARIABLE}={text} is no open socket: a wrapper around the script closed it. Start Python so "
            "that it inherits its parent's descriptors"
        ) from None
    os.set_inheritable(int(text), False)
    return channel


def _leave_in_child(channel: Channel, comm: Communicator) -> None:
    """A forked child (a loader process) must not keep this worker's connections open after its death."""
    global _run
    _run = None
    channel.close()
    comm.close_in_child()


def _check_spare() -> None:
    """Refuse to wait with a GPU in use: nothing says that it is that of the place to come, and its memory is needed."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise WorkerError("the script uses a GPU before elastictrain.init(), which a spare must not: call init() first")


def _take_place(welcome: Mapping[str, Any], streams: list[int]) -> None:
    """Become the worker whose place the welcome gives: its variables, its streams, its standing with the system."""
    os.environ.update(welcome["environment"])
    set_own_oom_score(int(welcome["oom_score"]))
    for stream, fd, target in zip((sys.stdout, sys.stderr), streams, (1, 2), strict=False):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # whatever the script has put there
            stream.flush()
        os.dup2(fd, target)
        os.close(fd)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=target == 2 or os.isatty(target))
    streams.clear()


def _device() -> torch.device:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")
