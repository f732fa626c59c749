"""The state of a worker: what is taken, given and loaded, and what the errors name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from elastictrain.errors import CheckpointError, ConfigError
from elastictrain.worker.collectives import Communicator
from elastictrain.worker.position import Cursor
from elastictrain.worker.recovery import Standing, choose_source
from elastictrain.worker.state import SMALL_BYTES, TrainingState, load_optimizer


class Counter:
    def __init__(self, numel: int = 1) -> None:
        self.value = torch.zeros(numel)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value.copy_(state["value"])


def make(width: int = 4) -> tuple[TrainingState, nn.Module, torch.optim.Optimizer, Any]:
    state = TrainingState(Communicator(torch.device("cpu")))
    module = nn.Linear(3, width)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for obj in (module, optimizer, schedule):
        state.add(obj, {})
    return state, module, optimizer, schedule


def train(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def test_state_of_one_worker_makes_another_one_equal_when_it_is_loaded() -> None:
    giver, module, optimizer, schedule = make()
    train(module, optimizer)
    schedule.step()
    taker, other, other_optimizer, other_schedule = make()
    parameters = list(other.parameters())
    taker.load(copy.deepcopy(giver.capture()), position="current")
    assert all(a is b for a, b in zip(parameters, other.parameters(), strict=True)), "parameters keep their identity"
    assert other_optimizer.param_groups[0]["params"][0] is parameters[0]
    assert torch.equal(module.weight, other.weight)
    assert other_schedule.state_dict() == schedule.state_dict()
    train(module, optimizer)
    train(other, other_optimizer)
    assert torch.equal(module.weight, other.weight), "momentum and learning rate came along"


def test_loaded_position_is_that_of_the_commit_when_the_receiver_runs_the_code_behind_it_itself() -> None:
    giver, _, optimizer, schedule = make()
    small = Counter()
    giver.register("small", small)
    small.value += 1
    giver.mark_commit()
    optimizer.step()
    schedule.step()
    small.value += 10
    whole = copy.deepcopy(giver.capture())
    for position, last_epoch, lr, value in (("committed", 0, 1.0, 1.0), ("current", 1, 0.5, 11.0)):
        taker, _, other, other_schedule = make()
        taken = Counter()
        taker.register("small", taken)
        taker.load(whole, position=position)
        assert (other_schedule.last_epoch, other.param_groups[0]["lr"], taken.value.item()) == (last_epoch, lr, value)
    taker, _, other, other_schedule = make()
    taker.register("small", Counter())
    other.param_groups[0]["lr"] = 0.125
    taker.load(whole, position="own")
    assert (other_schedule.last_epoch, other.param_groups[0]["lr"]) == (0, 0.125)


def test_checkpoint_holds_the_values_of_the_body_end_when_code_between_loops_has_changed_them() -> None:
    state, _, optimizer, schedule = make()
    small = Counter()
    state.register("small", small)
    state.mark_commit()
    small.value += 1
    state.mark_body_end()
    optimizer.step()
    schedule.step()
    small.value += 10
    saved = state.capture(at_body_end=True)
    assert saved["committed"]["schedulers"][0]["last_epoch"] == 0
    assert saved["registered"]["small"]["value"].item() == 1
    assert state.capture()["registered"]["small"]["value"].item() == 11


def test_large_object_is_copied_at_commits_when_it_was_seen_to_change_between_steps() -> None:
    state, *_ = make()
    large = Counter(SMALL_BYTES)
    state.register("large", large)
    for _ in range(4):
        state.mark_commit()
        state.notice_changes()
    assert "large" not in state.capture()["committed"]["registered"]
    large.value += 1
    state.notice_changes()
    state.mark_commit()
    large.value += 1
    assert state.capture()["committed"]["registered"]["large"]["value"][0].item() == 1


def test_what_code_did_behind_an_undone_attempt_is_taken_back_when_the_next_one_begins() -> None:
    state, _, optimizer, schedule = make()
    small = Counter()
    state.register("small", small)
    between = state.between()
    optimizer.step()
    schedule.step()
    small.value += 1
    state.load_between(between)
    assert (schedule.last_epoch, optimizer.param_groups[0]["lr"], small.value.item()) == (0, 1.0, 0.0)


def test_error_names_every_difference_when_the_state_is_another_scripts() -> None:
    giver, *_ = make(width=5)
    giver.register("average", Counter())
    taker, module, *_ = make()
    before = module.weight.clone()
    with pytest.raises(CheckpointError) as caught:
        taker.load(giver.capture(), position="current")
    text = str(caught.value)
    assert "weight has shape (5, 3), the model's is (4, 3)" in text
    assert "registered: the state has ['average'], this script []" in text
    assert torch.equal(module.weight, before), "nothing is changed"


def test_error_names_keys_when_the_model_has_others() -> None:
    giver, *_ = make()
    taker = TrainingState(Communicator(torch.device("cpu")))
    taker.add(nn.Linear(3, 4, bias=False), {})
    with pytest.raises(CheckpointError, match="optimizers: the state has 1"):
        taker.load(giver.capture(), position="current")


def test_optimizer_state_keeps_its_type_exactly_when_parameters_are_of_low_precision() -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    giver, taker = (torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for _ in range(2))
    exact = torch.tensor([1.00001, 2.00001, 3.00001, 4.00001])
    giver.state[parameter]["momentum_buffer"] = exact.clone()
    load_optimizer(taker, copy.deepcopy(giver.state_dict()))
    loaded = taker.state[parameter]["momentum_buffer"]
    assert loaded.dtype is torch.float32
    assert torch.equal(loaded, exact)


def frozen() -> tuple[TrainingState, nn.Module, torch.optim.Optimizer]:
    """A model whose bias is neither trained nor in the optimizer yet."""
    state = TrainingState(Communicator(torch.device("cpu")))
    module = nn.Linear(3, 4)
    module.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([module.weight], lr=1.0, momentum=0.9)
    for obj in (module, optimizer):
        state.add(obj, {})
    state.build()
    return state, module, optimizer


def unfreeze(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module.bias.requires_grad_(True)
    optimizer.add_param_group({"params": [module.bias], "lr": 0.25})


def test_parameters_unfrozen_since_the_start_and_their_group_come_along_when_the_state_is_loaded() -> None:
    giver, module, optimizer = frozen()
    unfreeze(module, optimizer)
    train(module, optimizer)
    taker, other, other_optimizer = frozen()
    taker.load(copy.deepcopy(giver.capture()), position="current")
    assert other.bias.requires_grad
    assert [group["lr"] for group in other_optimizer.param_groups] == [1.0, 0.25]
    assert other_optimizer.param_groups[1]["params"][0] is other.bias
    train(module, optimizer)
    train(other, other_optimizer)
    assert torch.equal(module.bias, other.bias), "momentum came along"


def test_group_is_left_to_the_code_that_adds_it_when_the_receiver_still_runs_that_code() -> None:
    giver, module, optimizer = frozen()
    giver.mark_commit()
    unfreeze(module, optimizer)
    taker, other, other_optimizer = frozen()
    taker.load(copy.deepcopy(giver.capture()), position="committed")
    assert len(other_optimizer.param_groups) == 1
    unfreeze(other, other_optimizer)
    assert [group["lr"] for group in other_optimizer.param_groups] == [1.0, 0.25]


def test_error_names_the_optimizer_when_the_state_has_other_parameter_groups() -> None:
    giver, *_ = frozen()
    taker, module, optimizer = frozen()
    optimizer.param_groups[0]["params"] = [module.weight, module.bias]
    with pytest.raises(CheckpointError, match=r"optimizer 0: the state's .* \[1\] parameters, this \[2\]"):
        taker.load(giver.capture(), position="current")


def test_optimizer_is_refused_when_it_trains_a_parameter_of_no_prepared_module() -> None:
    state, *_ = make()
    state.add(torch.optim.SGD([nn.Parameter(torch.ones(7))]), {})
    with pytest.raises(ConfigError, match=r"optimizer 1 \(SGD\) .* shape \(7,\)"):
        state.build()


def test_prepare_and_register_refuse_what_they_cannot_keep_when_it_is_given() -> None:
    state, *_ = make()
    with pytest.raises(ConfigError, match="register"):
        state.add(object(), {})
    with pytest.raises(ConfigError, match="state_dict"):
        state.register("x", object())
    state.register("x", Counter())
    with pytest.raises(ConfigError, match="that name"):
        state.register("x", Counter())


def standing(step: int, holds_state: bool = True, *, has_entered: bool = True) -> Standing:
    return Standing(step=step, holds_state=holds_state, evaluations=0, has_entered=has_entered)


@pytest.mark.parametrize(
    ("standings", "source"),
    [
        ([standing(3), standing(4), standing(4)], 1),
        ([standing(9, False), standing(4), standing(3)], 1),
        ([standing(4, has_entered=False), standing(4)], 1),
        ([standing(5, has_entered=False), standing(4)], 0),
        ([standing(0, False), standing(0, False)], None),
        ([standing(0), standing(0, False)], 0),
    ],
)
def test_source_is_the_lowest_rank_with_the_newest_state_when_ranks_meet(
    standings: list[Standing], source: int | None
) -> None:
    assert choose_source(standings) == source
    device = torch.device("cpu")
    assert [Standing.from_tensor(one.to_tensor(device)) for one in standings] == standings


def test_cursor_counts_batches_loops_and_epochs_when_steps_commit() -> None:
    cursor = Cursor()
    cursor.commit()
    cursor.commit()
    assert cursor.to_json() == {"step": 2, "epoch": 0, "loop": 0, "batch": 2, "loop_steps": 2}
    cursor.next_epoch()
    cursor.commit()
    assert cursor.to_json() == {"step": 3, "epoch": 1, "loop": 0, "batch": 1, "loop_steps": 3}
    cursor.next_loop(2, 5)
    assert cursor.to_json() == {"step": 3, "epoch": 5, "loop": 2, "batch": 0, "loop_steps": 0}
    other = Cursor()
    other.load(cursor.to_json())
    assert other == cursor


@pytest.mark.parametrize("values", [{}, {"step": 1}, {"step": "x", "epoch": 0, "loop": 0, "batch": 0, "loop_steps": 0}])
def test_cursor_is_refused_when_it_is_of_another_program(values: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="expected a cursor"):
        Cursor().load(values)
