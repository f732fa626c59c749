"""Undoing an attempt: everything it may touch comes back, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elastictrain.worker.collectives import Communicator
from elastictrain.worker.state import SMALL_BYTES, TrainingState
from elastictrain.worker.undo import PROBATION_STEPS, Undo


class Holder:
    """A registered object with one tensor."""

    def __init__(self, numel: int) -> None:
        self.value = torch.zeros(numel)
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value.copy_(state["value"])
        self.count = state["count"]


class Bench:
    """A small training state, with steps to take and undo."""

    def __init__(self, optimizer: Callable[[Any], torch.optim.Optimizer] | None = None, *, num_optimizers: int = 1):
        torch.manual_seed(0)
        self.state = TrainingState(Communicator(torch.device("cpu")))
        self.module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.state.add(self.module, {})
        make = optimizer or (lambda parameters: torch.optim.Adam(parameters, lr=0.1))
        groups = list(self.module.parameters())
        self.optimizers = [make(groups[i::num_optimizers]) for i in range(num_optimizers)]
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 1, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.scaler.scale(torch.ones(1))
        for obj in (*self.optimizers, self.schedule, self.scaler):
            self.state.add(obj, {})
        self.small, self.large = Holder(4), Holder(SMALL_BYTES)
        self.state.register("small", self.small)
        self.undo = Undo(self.state)
        self.undo.begin()
        for optimizer_ in self.optimizers:
            optimizer_.register_step_pre_hook(self.before)

    def before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], _: dict[str, Any]) -> None:
        self.undo.before_update(optimizer, has_closure=any(callable(one) for one in args[1:]))

    def backward(self) -> torch.Tensor:
        loss = self.module(torch.randn(6, 3)).square().mean()
        loss.backward()
        return loss

    def attempt(self) -> None:
        """Touch everything."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.schedule.step()
        self.scaler.update(4.0)
        self.small.value += 1
        self.small.count += 1

    def commit(self, num: int = 1) -> None:
        for _ in range(num):
            self.undo.begin()
            self.attempt()
            self.undo.commit()

    def picture(self) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "module": self.module.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "schedule": self.schedule.state_dict(),
                "scaler": self.scaler.state_dict(),
                "small": self.small.state_dict(),
                "gradients": [p.grad for p in self.module.parameters()],
            }
        )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize("num_optimizers", [1, 2])
@pytest.mark.parametrize("num_commits", [0, 1, PROBATION_STEPS - 1])
def test_everything_comes_back_when_an_attempt_is_undone_after_its_update(
    num_optimizers: int, num_commits: int
) -> None:
    bench = Bench(num_optimizers=num_optimizers)
    bench.commit(num_commits)
    before = bench.picture()
    bench.undo.begin()
    bench.attempt()
    assert not same(before["module"], bench.picture()["module"])
    assert bench.undo.rewind()
    after = bench.picture()
    assert same({**before, "gradients": 0}, {**after, "gradients": 0})
    assert bench.undo.rewind(), "nothing is left to undo"


def test_gradients_are_unscaled_again_when_the_first_attempt_was_undone_behind_unscale() -> None:
    bench = Bench()
    bench.commit(PROBATION_STEPS)
    for _ in range(2):
        bench.undo.begin()
        bench.optimizers[0].zero_grad()
        torch.manual_seed(1)
        bench.scaler.scale(bench.module(torch.randn(6, 3)).square().mean()).backward()
        scaled = bench.module[2].bias.grad.clone()
        bench.scaler.unscale_(bench.optimizers[0])
        torch.testing.assert_close(bench.module[2].bias.grad * bench.scaler.get_scale(), scaled)
        assert bench.undo.rewind()


@pytest.mark.parametrize("num_commits", [0, PROBATION_STEPS])
def test_parameter_group_is_gone_when_the_attempt_that_added_it_is_undone(num_commits: int) -> None:
    bench = Bench()
    bench.commit(num_commits)
    before = bench.picture()
    for _ in range(2):
        bench.undo.begin()
        extra = nn.Parameter(torch.ones(2))
        bench.optimizers[0].add_param_group({"params": [extra], "lr": 1.0})
        extra.sum().backward()
        if num_commits == 0:
            bench.attempt()
            bench.undo.rewind()
        else:
            assert bench.undo.rewind()
        assert len(bench.optimizers[0].param_groups) == 1
        assert bench.picture()["optimizers"][0]["state"].keys() == before["optimizers"][0]["state"].keys()


def test_parameters_need_a_peer_when_an_update_without_a_copy_is_undone() -> None:
    bench = Bench()
    bench.commit(PROBATION_STEPS)
    bench.undo.begin()
    bench.attempt()
    assert not bench.undo.rewind()


def test_updates_are_copied_for_ever_when_a_collective_came_after_one() -> None:
    bench = Bench()
    bench.undo.saw_late_collective()
    bench.commit(PROBATION_STEPS + 2)
    before = bench.picture()["module"]
    bench.undo.begin()
    bench.attempt()
    assert bench.undo.rewind()
    assert same(before, bench.picture()["module"])


def test_update_with_a_closure_comes_back_when_it_is_undone() -> None:
    bench = Bench(lambda parameters: torch.optim.LBFGS(parameters, max_iter=3))
    batch = torch.randn(6, 3)

    def closure() -> torch.Tensor:
        bench.optimizers[0].zero_grad()
        loss = bench.module(batch).square().mean()
        loss.backward()
        return loss

    for _ in range(PROBATION_STEPS + 1):
        bench.undo.begin()
        bench.optimizers[0].step(closure)
        bench.undo.commit()
    before = bench.picture()
    bench.undo.begin()
    bench.optimizers[0].step(closure)
    assert bench.undo.rewind()
    after = bench.picture()
    assert same(before["module"], after["module"])
    assert same(before["optimizers"], after["optimizers"])


def test_gradients_stay_none_when_there_were_none() -> None:
    bench = Bench()
    bench.backward()
    bench.undo.rewind()
    assert all(p.grad is None for p in bench.module.parameters())


def test_gradients_come_back_when_they_were_still_to_be_used() -> None:
    """A script that accumulates: its first step makes no update, so the gradients are live at the next."""
    bench = Bench()
    bench.backward()
    bench.undo.commit()
    before = bench.picture()["gradients"]
    bench.undo.begin()
    bench.backward()
    assert bench.undo.rewind()
    assert same(before, bench.picture()["gradients"])


def test_used_gradients_are_zero_when_the_attempt_had_overwritten_them() -> None:
    """`zero_grad(set_to_none=False)` at the start of a step: what stood there before it is of no use to anybody."""
    bench = Bench()
    bench.commit()
    tensors = [p.grad for p in bench.module.parameters()]
    bench.undo.begin()
    bench.optimizers[0].zero_grad(set_to_none=False)
    bench.backward()
    assert bench.undo.rewind()
    for parameter, tensor in zip(bench.module.parameters(), tensors, strict=True):
        assert parameter.grad is tensor
        assert not parameter.grad.any()


def test_large_registered_object_needs_a_peer_once_and_is_copied_after_that() -> None:
    bench = Bench()
    bench.state.register("large", bench.large)
    bench.commit(PROBATION_STEPS)
    bench.undo.begin()
    bench.large.value += 1
    assert not bench.undo.rewind()
    before = bench.large.value.clone()
    bench.undo.begin()
    bench.large.value += 1
    assert bench.undo.rewind()
    assert torch.equal(before, bench.large.value)
