"""A module that stays the same object while the DistributedDataParallel around it is rebuilt for every generation.

Gradients are summed with this rank's weight, `share / global batch`, so that the update equals the one that a single
process would make on the whole global batch, whatever the shares. Buffers are not broadcast from rank 0:
`worker.buffers` folds the weighted mean of what each rank's forward did to them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from elastictrain.errors import ConfigError
from elastictrain.worker.collectives import Communicator


class GradientReduction:
    """The communication hook of one attempt: scales each bucket by this rank's weight and sums it over the ranks.

    `begin` resets it for an attempt; `on_start` is called after each bucket that has been sent off.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._scale: Callable[[], float] = lambda: 1.0
        self._on_start: Callable[[], None] = lambda: None
        self._futures: list[torch.futures.Future[torch.Tensor]] = []

    def begin(self, scale: Callable[[], float], on_start: Callable[[], None]) -> None:
        self._scale, self._on_start = scale, on_start
        self._futures = []

    def reset(self) -> None:
        self._futures = []

    @property
    def has_started(self) -> bool:
        return bool(self._futures)

    @property
    def has_failed(self) -> bool:
        return any(future.done() and not _is_success(future) for future in self._futures)

    def reduce_bucket(self, _: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """DDP communication hook; runs in the thread of the backward pass."""
        buffer = bucket.buffer()
        buffer.mul_(self._scale())
        future = self._comm.reduce_async(buffer)
        assert future is not None  # there is no DDP, and so no hook, in a world of one
        self._futures.append(future)
        self._on_start()
        return future


def _is_success(future: torch.futures.Future[torch.Tensor]) -> bool:
    try:
        future.value()
    except RuntimeError:
        return False
    return True


# DDP compares the hook's annotations with its own classes, and these are text here.
GradientReduction.reduce_bucket.__annotations__.clear()


def unwrap(module: nn.Module) -> nn.Module:
    """The user's own module inside any wrapper (ours, DataParallel, DDP): its keys have no prefix."""
    while isinstance(module, ElasticModule | DataParallel | DistributedDataParallel):
        module = module.module
    return module


class ElasticModule(nn.Module):
    """What `run.prepare` returns for a module: same parameters, keys and calls as DDP around it.

    Outside a world, and in a world of one, a call goes straight to `module`.
    """

    def __init__(self, module: nn.Module, comm: Communicator, options: Mapping[str, Any]) -> None:
        super().__init__()
        if isinstance(module, DistributedDataParallel):
            raise ConfigError(
                "prepare() takes the module itself, not one inside DistributedDataParallel: pass the inner module, "
                "prepare() wraps it"
            )
        self.module = unwrap(module)
        self._comm = comm
        self._options = dict(options)
        self._inner: list[DistributedDataParallel] = []  # in a list, so that nn.Module does not register it
        self._known: list[nn.Parameter] = []
        self._trained: list[bool] = []  # which of `_known` the wrapper was made for
        self.reduction = GradientReduction(comm)
        self.train(module.training)

    def build(self) -> None:
        """Wrap for the communicator's present group; calls no collective by itself."""
        self.drop()
        if self._comm.world_size == 1:
            return
        self._known = list(self.module.parameters())
        self._wrap([p.requires_grad for p in self._known])

    def _wrap(self, trained: list[bool]) -> None:
        self._trained = trained
        if not any(trained):
            return
        device = self._comm.device
        with warnings.catch_warnings():
            # Newer torch announces another name for broadcast_buffers, which would still sync at the start.
            warnings.simplefilter("ignore", FutureWarning)
            wrapped = DistributedDataParallel(
                self.module,
                device_ids=[device] if device.type == "cuda" else None,
                broadcast_buffers=False,
                init_sync=False,  # the sync stage has made all ranks equal
                # Saves a copy of every gradient, which pays for the pass over them that scales by this rank's weight.
                **{"gradient_as_bucket_view": True, **self._options},
            )
        wrapped.register_comm_hook(None, self.reduction.reduce_bucket)
        self._inner.append(wrapped)

    def drop(self) -> None:
        """Let go of the wrapper and of everything in it that would keep the old group's sockets open."""
        self.reduction.reset()
        self._known, self._trained = [], []
        self._unwrap()

    def _unwrap(self) -> None:
        while self._inner:
            wrapped = self._inner.pop()
            wrapped._remove_autograd_hooks()  # type: ignore[no-untyped-call]
            wrapped.__dict__.clear()

    def _takes_part(self) -> bool:
        """Whether a backward pass now reduces gradients. Wraps anew when parameters were frozen or unfrozen.

        DDP only knows the parameters that were trained when it was made: it would leave the gradients of later ones to
        each rank, and wait for those of frozen ones.
        """
        trained = [p.requires_grad for p in self._known]
        if not any(trained):
            return False
        is_local = bool(self._inner) and not self._inner[0].require_backward_grad_sync  # inside `no_sync`
        if trained != self._trained and not is_local:
            self._unwrap()
            self._wrap(trained)
        return bool(self._inner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self._takes_part():
            return self._inner[0](*args, **kwargs)
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As DistributedDataParallel.no_sync: backward passes inside accumulate locally."""
        with self._inner[0].no_sync() if self._takes_part() else contextlib.nullcontext():
            yield
