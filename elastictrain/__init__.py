"""Fault-tolerant elastic training for PyTorch DDP.

    run = elastictrain.init()
    model, optimizer = run.prepare(model, optimizer)
    for step in run.steps(dataset, batch_size=256, epochs=10):
        with step as (inputs, targets):
            ...

Names are loaded when they are first used, so that commands which need no torch start without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from elastictrain.errors import CheckpointError, ConfigError, DataError, ElasticTrainError, WorkerError
    from elastictrain.launching import launch
    from elastictrain.worker.joining import init
    from elastictrain.worker.run import Run
    from elastictrain.worker.step import Step

__version__: Final = "0.1.0"

_HOMES: Final = {
    "CheckpointError": "elastictrain.errors",
    "ConfigError": "elastictrain.errors",
    "DataError": "elastictrain.errors",
    "ElasticTrainError": "elastictrain.errors",
    "Run": "elastictrain.worker.run",
    "Step": "elastictrain.worker.step",
    "WorkerError": "elastictrain.errors",
    "init": "elastictrain.worker.joining",
    "launch": "elastictrain.launching",
}

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "ElasticTrainError",
    "Run",
    "Step",
    "WorkerError",
    "init",
    "launch",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
