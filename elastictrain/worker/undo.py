"""What an attempt at a step may touch, taken when it begins and put back when it is aborted.

Parameters and optimizer state need no copy as long as the script's one optimizer step comes after the last collective:
then nothing can fail once they change. Until a script has shown that it is of this kind, in its first PROBATION_STEPS
steps, and always for scripts that are not (several optimizers, a closure, a collective after the update), they are
copied before the update. Gradients are kept by reference: they are copied only when they are still to be used.
"""

from __future__ import annotations

import copy
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from elastictrain.worker.buffers import FlatCopy
from elastictrain.worker.state import SMALL_BYTES, TrainingState, drop_groups, marks_of, tensors_of

PROBATION_STEPS: Final = 3


class Undo:
    """The way back to the beginning of the current attempt."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._probation = PROBATION_STEPS
        self._copies_always = False
        self.buffers = FlatCopy([])
        self._gradients: list[tuple[nn.Parameter, torch.Tensor, int, torch.Tensor | None]] = []
        self._position: dict[str, Any] = {}
        self._registered: dict[str, Any] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._updates: list[tuple[Optimizer, list[torch.Tensor], dict[Any, Any]]] = []
        self._unscaled: list[dict[Any, Any]] = []
        self.num_updates = 0
        self._is_open = False

    def begin(self) -> None:
        """Remember what the attempt that begins now may touch."""
        state = self._state
        state.notice_changes()
        self._is_open = True
        self.buffers = FlatCopy(state.buffers())
        self._gradients = [
            (p, gradient, gradient._version, gradient.clone() if state.has_live_gradients else None)
            for p in state.parameters()
            if (gradient := p.grad) is not None
        ]
        self._position = state.position()
        self._remember_registered()
        self._unscaled = [_copied_once(marks_of(scaler)) for scaler in state.scalers]
        self._updates = []
        self.num_updates = 0

    def _remember_registered(self) -> None:
        self._registered, self._versions = {}, []
        for name, obj in self._state.registered.items():
            values = obj.state_dict()
            tensors = tensors_of(values)
            if sum(t.numel() * t.element_size() for t in tensors) <= SMALL_BYTES or self._copies_updates:
                self._registered[name] = copy.deepcopy(values)
            else:
                self._versions.extend((tensor, tensor._version) for tensor in tensors)

    @property
    def _copies_updates(self) -> bool:
        return self._copies_always or self._probation > 0 or len(self._state.optimizers) > 1

    def before_update(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Called before `optimizer` changes its parameters."""
        if has_closure or self.num_updates:
            self._copies_always = True
        if self._copies_updates:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            values = [p.detach().clone() for p in parameters]
            self._updates.append((optimizer, values, copy.deepcopy(dict(optimizer.state_dict()))))
        self.num_updates += 1

    def saw_late_collective(self) -> None:
        """The script calls a collective after an update: from now on updates must be undoable."""
        self._copies_always = True

    def commit(self) -> None:
        self._state.has_live_gradients = self.num_updates == 0
        self._probation = max(0, self._probation - 1)
        self.forget()
        self._state.mark_commit()

    def forget(self) -> None:
        self._is_open = False
        self.buffers = FlatCopy([])
        self._gradients, self._registered, self._versions, self._updates = [], {}, [], []
        self._unscaled = []

    @torch.no_grad()
    def rewind(self) -> bool:
        """Put everything back; between attempts there is nothing to do. Idempotent.

        False when something without a copy has changed: the rank needs a peer's state then.
        """
        if not self._is_open:
            return True
        clean = self.num_updates == len(self._updates)
        for optimizer, values, optimizer_state in reversed(self._updates):
            drop_groups(optimizer, len(optimizer_state["param_groups"]))
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
            optimizer.load_state_dict(optimizer_state)
        self.buffers.put_back(self._state.buffers())
        for parameter in self._state.parameters():
            parameter.grad = None
        for parameter, gradient, version, kept in self._gradients:
            _restore_gradient(parameter, gradient, version, kept)
        for name, values in self._registered.items():
            self._state.registered[name].load_state_dict(values)
        if any(tensor._version != version for tensor, version in self._versions):
            clean, self._copies_always = False, True
        self._state.load_position(self._position)
        for scaler, marks in zip(self._state.scalers, self._unscaled, strict=True):
            marks_of(scaler).clear()
            marks_of(scaler).update(_copied_once(marks))
        self.forget()
        return clean


def _copied_once(marks: dict[Any, Any]) -> dict[Any, Any]:
    return {key: dict(value) for key, value in marks.items()}


def _restore_gradient(parameter: nn.Parameter, gradient: torch.Tensor, version: int, kept: torch.Tensor | None) -> None:
    """Give `parameter` the gradient it had. One that was used up already and then overwritten becomes zero again."""
    if kept is not None:
        gradient.copy_(kept)
    elif gradient._version != version:
        gradient.zero_()
    parameter.grad = gradient
