"""What the main thread of this worker is doing, as the control thread sees it: the answer to the agent's `where`.

The agent asks when nothing was committed for long. A worker that waits for others (in a collective, or for the agent)
is not the one that hangs.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

MAX_STACK_CHARACTERS: Final = 8000
# Code in which a thread waits for other ranks or for the agent, and code that takes long because it compiles.
WAITING_MODULES: Final = ("torch.distributed", "elastictrain.worker.collectives", "elastictrain.worker.control")
COMPILING_MODULES: Final = ("torch._dynamo", "torch._inductor", "torch.fx", "triton")


def find_whereabouts(*, place: str, has_flights: bool) -> dict[str, Any]:
    """`place`, as the main thread has named it; whether it waits for others; whether it compiles; its Python stack."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    modules = [str(one.f_globals.get("__name__", "")) for one in _frames(frame)]
    stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
    return {
        "place": place,
        "waits": has_flights or any(_is_in(module, WAITING_MODULES) for module in modules),
        "compiles": any(_is_in(module, COMPILING_MODULES) for module in modules),
        "stack": stack[-MAX_STACK_CHARACTERS:],
    }


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_in(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)
