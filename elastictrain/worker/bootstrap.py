"""What a worker process does from its first instruction to its last: the user's program, and how it ended.

Runs in a child that the fork server has just forked (torch is imported already), or, with `--start-method spawn`, in
a new interpreter through `python -m elastictrain.worker.bootstrap`.
"""

from __future__ import annotations

import atexit
import builtins
import importlib
import json
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from elastictrain.channel import Channel, worker_channel
from elastictrain.config import CHANNEL_FD_VARIABLE, ENTRYPOINT_VARIABLE
from elastictrain.errors import ConfigError

OWN_FRAMES: Final = ("runpy", "elastictrain.worker.bootstrap", "elastictrain.agent.forkserver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrypoint:
    """What the workers run. `kind` is "script", "module", "command" or "function"; `argv[0]` names it."""

    kind: str
    argv: tuple[str, ...]
    function: Callable[..., Any] | None = None
    function_args: tuple[Any, ...] = ()

    def to_json(self) -> str:
        return json.dumps({"kind": self.kind, "argv": list(self.argv)})

    @classmethod
    def from_json(cls, text: str) -> Entrypoint:
        values: Mapping[str, Any] = json.loads(text)
        return cls(kind=str(values["kind"]), argv=tuple(str(arg) for arg in values["argv"]))


def run_entrypoint(entrypoint: Entrypoint) -> int:
    """Run the user's program to its end in this process and return the exit code; an exception is reported first."""
    try:
        if entrypoint.kind == "command":
            os.execvp(entrypoint.argv[0], list(entrypoint.argv))
        _call(entrypoint)
        code = 0
    except SystemExit as exit_:
        code = _exit_code(exit_)
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:  # the edge of the process: whatever ended the script is reported, then it ends
        code = 1
        _report(error)
    return _finish(code)


def _call(entrypoint: Entrypoint) -> None:
    if "torch.distributed" in sys.modules:
        from elastictrain.worker.destruction import make_destruction_safe

        make_destruction_safe()
    if entrypoint.kind == "function":
        assert entrypoint.function is not None
        _call_function(entrypoint.function, entrypoint.function_args)
        return
    sys.argv = list(entrypoint.argv)
    if entrypoint.kind == "module":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(entrypoint.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(entrypoint.argv[0])))
        runpy.run_path(entrypoint.argv[0], run_name="__main__")


def _call_function(function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Call `function(*args)`; one with one parameter more gets the local rank first, as spawn-style code has it."""
    function(*((int(os.environ["LOCAL_RANK"]), *args) if takes_local_rank(function, args) else args))


def takes_local_rank(function: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether `args` are too few for `function`, so that the local rank goes first."""
    import inspect

    try:
        inspect.signature(function).bind(*args)
    except TypeError:
        return True
    except ValueError:  # built in, and nobody knows what it takes
        return False
    return False


def _exit_code(exit_: SystemExit) -> int:
    if exit_.code is None:
        return 0
    if isinstance(exit_.code, int):
        return exit_.code & 0xFF
    print(exit_.code, file=sys.stderr)
    return 1


def _report(error: BaseException) -> None:
    """Print the traceback as the interpreter would, without our own frames, and tell the agent."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in OWN_FRAMES:
        trace = trace.tb_next
    if trace is not None:
        error.__traceback__ = trace
    hook, trace = sys.excepthook, error.__traceback__
    joining = sys.modules.get("elastictrain.worker.joining")
    if joining is not None and joining.current_run() is not None:
        hook(type(error), error, trace)  # installed by init(): reports, then prints
        return
    text = "".join(traceback.format_exception(type(error), error, trace))
    channel = _own_channel()
    if channel is not None:
        channel.send(
            "exception",
            error_type=type(error).__name__,
            message=str(error),
            traceback=text,
            rank=None,
            step=None,
            is_config=isinstance(error, ConfigError),
        )
    hook(type(error), error, trace)


def _own_channel() -> Channel | None:
    """The channel of a worker that has not joined; None where it was closed."""
    try:
        return worker_channel(os.dup(int(os.environ[CHANNEL_FD_VARIABLE])))
    except (KeyError, ValueError, OSError):
        return None


def _finish(code: int) -> int:
    """What the interpreter does at exit: wait for threads, run exit functions, flush. Returns the exit code."""
    if code != 0:
        joining = sys.modules.get("elastictrain.worker.joining")
        run = joining.current_run() if joining is not None else None
        if run is not None:
            run.abandon()
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:  # an exit function of the user's failed: print it, keep the worse exit code
        traceback.print_exc()
        code = code or 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            code = code or 1
    return code


def main() -> None:
    """Entry point of `--start-method spawn`: the program comes in an environment variable."""
    entrypoint = Entrypoint.from_json(os.environ.pop(ENTRYPOINT_VARIABLE))
    # The user's script is to see an interpreter of its own.
    sys.modules.pop("__main__", None)
    sys.modules["__main__"] = importlib.import_module("types").ModuleType("__main__")
    sys.modules["__main__"].__builtins__ = builtins  # type: ignore[attr-defined]
    os._exit(run_entrypoint(entrypoint))


if __name__ == "__main__":
    main()
