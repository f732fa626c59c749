"""How many workers a node has place for, in torchrun's words: a number, cpu, gpu, xpu, auto or a device's name."""

from __future__ import annotations

import os

from elastictrain.notation import Given, read_count

_EXPECTED = "a number of workers from 1 up, or auto, cpu, gpu, xpu"


def count_workers(given: Given) -> int:
    """Resolve --nproc-per-node.

    A number and `cpu` need no torch; every other word imports it, which blocks for about two seconds. Raises
    ConfigError where the value is no number from 1 up and no device of this machine.
    """
    text = given.text
    if text == "cpu":
        return len(os.sched_getaffinity(0))
    if text in {"gpu", "xpu", "auto"} or (text.isidentifier() and _has_device_extension()):
        return _count_devices(given)
    if not text.lstrip("+-").isdecimal():
        raise given.error(expected=_EXPECTED, fix="give e.g. --nproc-per-node 2")
    return read_count(given, minimum=1, example=1)


def _has_device_extension() -> bool:
    """Tell whether a package is installed that brings torch a device of its own name."""
    from importlib import metadata  # here: most starts never need it, and it is slow to import

    return bool(metadata.entry_points(group="torch.backends"))


def _count_devices(given: Given) -> int:
    import torch  # here: a start with a plain number must not pay for it

    match given.text:
        case "auto":
            return torch.accelerator.device_count() or len(os.sched_getaffinity(0))
        case "gpu":
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        case "xpu":
            count = torch.xpu.device_count() if torch.xpu.is_available() else 0
        case name:
            device = getattr(torch, name, None)
            is_extension = name == torch._C._get_privateuse1_backend_name() and hasattr(device, "is_available")
            count = device.device_count() if device is not None and is_extension and device.is_available() else 0
    if count < 1:
        raise given.error(
            expected=_EXPECTED, fix=f"torch sees no {given.text} here: give e.g. --nproc-per-node 2 or cpu"
        )
    return count
