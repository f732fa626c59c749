"""Everything of a training script that must survive: what it is, and how to take it, give it and load it whole.

The state of a worker is made of the objects it handed to `prepare` and `register`. Two readings of it differ:
`capture` is the whole (for checkpoints and for ranks that need it), and the *position values* are the parts that code
between two steps may change (LR schedules, scaler, optimizer settings, registered objects), kept as they were at the
commit, because a rank that resumes from there runs the code between the steps itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from elastictrain.errors import CheckpointError, ConfigError
from elastictrain.worker.buffers import BufferReduction
from elastictrain.worker.collectives import Communicator
from elastictrain.worker.module import ElasticModule

T = TypeVar("T")

SMALL_BYTES: Final = 1 << 20
COPIED_COMMITS: Final = 3


@runtime_checkable
class Stateful(Protocol):
    """What `register` takes: anything that can give its state and take it back."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def is_scaler(obj: object) -> bool:
    """Whether `obj` is a GradScaler of any device, without importing the CUDA one."""
    return any(base.__name__ == "GradScaler" for base in type(obj).__mro__)


def marks_of(scaler: object) -> dict[Any, Any]:
    """What a gradient scaler notes of each optimizer between `unscale_` and `update`; not in its state_dict.

    A step that is tried again while they stand would take its scaled gradients for unscaled ones.
    """
    marks: dict[Any, Any] = getattr(scaler, "_per_optimizer_states", {})
    return marks


class TrainingState:
    """The prepared and registered objects of one worker."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.modules: list[ElasticModule] = []
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[Stateful] = []
        self.scalers: list[Stateful] = []
        self.registered: dict[str, Stateful] = {}
        self._committed: dict[str, Any] = {}
        self._body_end: dict[str, Any] = {}
        self._changed_between: set[str] = set()
        self._versions: dict[str, list[tuple[torch.Tensor, int]]] = {}
        self._num_commits = 0
        self._submodules: list[nn.Module] = []
        self.buffer_reduction = BufferReduction(comm, self.buffers)
        self._num_groups: list[int] = []
        self.has_live_gradients = False
        """No optimizer has used the gradients of the newest committed step yet: they are part of the state."""

    def add(self, obj: object, options: Mapping[str, Any]) -> object:
        """Take one object of `prepare`. Raises ConfigError when it is nothing that training is made of."""
        if isinstance(obj, nn.Module):
            module = ElasticModule(obj.to(self._comm.device), self._comm, options)
            self.modules.append(module)
            self._submodules.extend(module.module.modules())
            return module
        if isinstance(obj, Optimizer):
            self.optimizers.append(obj)
        elif is_scaler(obj):
            self.scalers.append(cast(Stateful, obj))
        elif isinstance(obj, Stateful) and hasattr(obj, "step"):
            self.schedulers.append(obj)
        else:
            raise ConfigError(
                f"prepare() takes modules, optimizers, LR schedulers and gradient scalers, saw {type(obj).__name__}: "
                "use run.register(name=obj) for anything else with state_dict and load_state_dict"
            )
        return obj

    def register(self, name: str, obj: object) -> None:
        if not isinstance(obj, Stateful):
            raise ConfigError(
                f"register({name}=...) takes an object with state_dict and load_state_dict, saw {type(obj).__name__}",
                field=name,
            )
        if name in self.registered and self.registered[name] is not obj:
            raise ConfigError(f"register({name}=...): another object has that name already", field=name)
        self.registered[name] = obj

    def build(self) -> None:
        self.buffer_reduction.regroup()
        for module in self.modules:
            module.build()
        # As DDP does: looked up once, since a walk over all names costs more than the rest of a step's bookkeeping.
        self._submodules = [submodule for module in self.modules for submodule in module.module.modules()]
        self._num_groups = self._num_groups or [len(optimizer.param_groups) for optimizer in self.optimizers]
        self._refuse_foreign_parameters()

    def _refuse_foreign_parameters(self) -> None:
        known = {id(parameter) for parameter in self.parameters()}
        for number, optimizer in enumerate(self.optimizers):
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                if id(parameter) not in known:
                    raise ConfigError(
                        f"optimizer {number} ({type(optimizer).__name__}) trains a parameter of shape "
                        f"{tuple(parameter.shape)} that is in no prepared module: each rank would train its own. Give "
                        "prepare() the module it belongs to, before the steps begin"
                    )

    def drop(self) -> None:
        for module in self.modules:
            module.drop()

    def parameters(self) -> list[nn.Parameter]:
        return _distinct(submodule._parameters for submodule in self._submodules)

    def buffers(self) -> list[torch.Tensor]:
        return _distinct(submodule._buffers for submodule in self._submodules)

    # -- what code between steps may change ------------------------------------------------------------------------

    def mark_commit(self) -> None:
        """Remember the position values of this commit, for ranks that have to run the code behind it themselves.

        Small registered objects are copied. Large ones are copied in the first COPIED_COMMITS commits, and after that
        only those that have been seen to change between steps.
        """
        tensors = {name: tensors_of(obj.state_dict()) for name, obj in self.registered.items()}
        self._versions = {name: [(tensor, tensor._version) for tensor in some] for name, some in tensors.items()}
        self._committed = self._body_end = self._mark()
        self._num_commits += 1

    def mark_body_end(self) -> None:
        """Remember them at the end of the loop's body, where a program that resumes at this step goes on."""
        self._body_end = self._mark()

    def _mark(self) -> dict[str, Any]:
        copies: dict[str, Any] = {}
        for name, obj in self.registered.items():
            values = obj.state_dict()
            is_small = sum(t.numel() * t.element_size() for t in tensors_of(values)) <= SMALL_BYTES
            if is_small or name in self._changed_between or self._num_commits < COPIED_COMMITS:
                copies[name] = copy.deepcopy(values)
        return {**self.position(), "registered": copies}

    def notice_changes(self) -> None:
        """Find the registered objects that have changed since the commit; called before the next attempt begins."""
        for name, versions in self._versions.items():
            if any(tensor._version != version for tensor, version in versions):
                self._changed_between.add(name)

    def between(self) -> dict[str, Any]:
        """A private copy of everything that code between steps may change, to be put back with `load_between`."""
        registered = {name: copy.deepcopy(obj.state_dict()) for name, obj in self.registered.items()}
        return {**self.position(), "registered": registered}

    def load_between(self, values: Mapping[str, Any]) -> None:
        self.load_position(values)
        for name, value in values["registered"].items():
            self.registered[name].load_state_dict(copy.deepcopy(value))

    # -- the whole -------------------------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """A private copy of the small parts that code between steps may change."""
        return {
            "schedulers": [copy.deepcopy(scheduler.state_dict()) for scheduler in self.schedulers],
            "scalers": [copy.deepcopy(scaler.state_dict()) for scaler in self.scalers],
            "settings": [
                [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
                for optimizer in self.optimizers
            ],
        }

    def load_position(self, values: Mapping[str, Any]) -> None:
        for scheduler, value in zip(self.schedulers, values["schedulers"], strict=True):
            scheduler.load_state_dict(copy.deepcopy(value))
        for scaler, value in zip(self.scalers, values["scalers"], strict=True):
            scaler.load_state_dict(copy.deepcopy(value))
        for optimizer, groups in zip(self.optimizers, values["settings"], strict=True):
            drop_groups(optimizer, len(groups))
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)

    def capture(self, *, at_body_end: bool = False) -> dict[str, Any]:
        """The whole state; tensors are the live ones, not copies. Keys carry no wrapper's prefix.

        `at_body_end`, for checkpoints, leaves out what code between loops has changed since.
        """
        current = self.position()
        committed = (self._body_end if at_body_end else self._committed) or {**current, "registered": {}}
        registered = {name: obj.state_dict() for name, obj in self.registered.items()}
        if at_body_end:
            registered.update(committed["registered"])
            committed = current = {**committed, "registered": {}}
        gradients = [p.grad for p in self.parameters()] if self.has_live_gradients else None
        return {
            "gradients": gradients,
            "modules": [dict(module.module.state_dict()) for module in self.modules],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "registered": registered,
            "committed": committed,
            "current": current,
            "trained": [p.requires_grad for p in self.parameters()],
            "groups": self._groups(),
        }

    def _groups(self) -> list[list[list[int]]]:
        """For each optimizer and each of its parameter groups the places of its parameters in `parameters()`."""
        places = {id(parameter): place for place, parameter in enumerate(self.parameters())}
        return [
            [[places.get(id(p), -1) for p in group["params"]] for group in optimizer.param_groups]
            for optimizer in self.optimizers
        ]

    def load(self, state: Mapping[str, Any], *, position: str) -> None:
        """Load what `capture` gave. Objects and parameters keep their identity.

        `position` names the position values: those of the "committed" step, the giver's "current" ones, or this rank's
        "own", which stay. Raises CheckpointError when the state was made by a script with other objects; nothing is
        changed then.
        """
        # Checkpoints of an earlier version do not tell these two.
        state = {"trained": [p.requires_grad for p in self.parameters()], "groups": self._groups(), **state}
        self._check_shape(state)
        own = self.position()
        for module, values in zip(self.modules, state["modules"], strict=True):
            module.module.load_state_dict(values)
        parameters = self.parameters()
        if position != "own":
            for parameter, is_trained in zip(parameters, state["trained"], strict=True):
                parameter.requires_grad_(is_trained)
        for optimizer, values, groups in zip(self.optimizers, state["optimizers"], state["groups"], strict=True):
            for places in groups[len(optimizer.param_groups) :]:
                optimizer.add_param_group({"params": [parameters[place] for place in places]})
            drop_groups(optimizer, len(groups))
            load_optimizer(optimizer, values)
        self._load_gradients(state.get("gradients"))
        at_commit = state["committed"]["registered"]
        for name, values in state["registered"].items():
            chosen = at_commit.get(name, values) if position == "committed" else values
            # A copy: an object may keep the very tensors that it is given, and these are used again.
            self.registered[name].load_state_dict(copy.deepcopy(chosen))
        self.load_position(own if position == "own" else state[position])
        if position != "own":
            self._committed, self._body_end, self._versions = dict(state["committed"]), {}, {}

    def _load_gradients(self, gradients: list[torch.Tensor | None] | None) -> None:
        """Take over gradients that are still to be used, None when there are none."""
        self.has_live_gradients = gradients is not None
        for parameter, gradient in zip(self.parameters(), gradients or [], strict=False):
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)

    def _check_shape(self, state: Mapping[str, Any]) -> None:
        mine = {
            "modules": len(self.modules),
            "optimizers": len(self.optimizers),
            "schedulers": len(self.schedulers),
            "scalers": len(self.scalers),
            "registered": sorted(self.registered),
        }
        theirs = {
            "modules": len(state["modules"]),
            "optimizers": len(state["optimizers"]),
            "schedulers": len(state["committed"]["schedulers"]),
            "scalers": len(state["committed"]["scalers"]),
            "registered": sorted(state["registered"]),
        }
        problems = [
            f"{key}: the state has {theirs[key]}, this script {mine[key]}" for key in mine if mine[key] != theirs[key]
        ]
        for index, (module, values) in enumerate(zip(self.modules, state["modules"], strict=False)):
            problems.extend(f"module {index}: {text}" for text in _differences(module.module, values))
        for index, (own, saved) in enumerate(zip(self._groups(), state["groups"], strict=False)):
            at_least = self._num_groups[index] if self._num_groups else len(own)
            is_foreign = any(place < 0 for group in saved for place in group)
            if is_foreign or len(saved) < at_least or own[: len(saved)] != saved[: len(own)]:
                sizes = [[len(group) for group in groups] for groups in (saved, own)]
                problems.append(
                    f"optimizer {index}: the state's parameter groups have {sizes[0]} parameters, this {sizes[1]}"
                )
        if problems:
            raise CheckpointError(
                "the saved state does not fit this script: "
                + "; ".join(problems[:8])
                + ". Prepare and register the same objects in the same order as the script that saved it"
            )


def _distinct(holders: Iterable[Mapping[str, T | None]]) -> list[T]:
    """Every value once, in order of first appearance."""
    return list({id(value): value for values in holders for value in values.values() if value is not None}.values())


def _differences(module: nn.Module, values: Mapping[str, Any]) -> Iterable[str]:
    own = module.state_dict()
    for name in sorted(own.keys() - values.keys()):
        yield f"{name} is missing in the state"
    for name in sorted(values.keys() - own.keys()):
        yield f"{name} is unknown to this model"
    for name in sorted(own.keys() & values.keys()):
        mine, theirs = own[name], values[name]
        if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor) and mine.shape != theirs.shape:
            yield f"{name} has shape {tuple(theirs.shape)}, the model's is {tuple(mine.shape)}"


def drop_groups(optimizer: Optimizer, num_kept: int) -> None:
    """Take back parameter groups that were added: whoever is to run the code that adds them does not have them yet."""
    for group in optimizer.param_groups[num_kept:]:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
    del optimizer.param_groups[num_kept:]


def load_optimizer(optimizer: Optimizer, values: Mapping[str, Any]) -> None:
    """`optimizer.load_state_dict`, but exact: that method casts state to the parameter's type, which would round it."""
    optimizer.load_state_dict(cast("dict[str, Any]", values))
    flat = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in values["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, flat, strict=True):
        for key, saved in values["state"].get(number, {}).items():
            loaded = optimizer.state[parameter].get(key)
            if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != saved.dtype:
                optimizer.state[parameter][key] = saved.clone().to(loaded.device)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_of(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []
