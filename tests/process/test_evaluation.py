"""Workers are killed around evaluations and in loops of every kind; the run's outcome is the undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest
from support_eval import assert_exactly_once, assert_same, finished, is_close


def compare(tmp_path: Path, die: str, *script_args: str) -> None:
    disturbed = finished(tmp_path / "disturbed", *script_args, "--die", die)
    undisturbed = finished(tmp_path / "undisturbed", *script_args)
    died = {path.name for path in (disturbed.folder / "out").glob("died-*")}
    assert died == {f"died-{one}" for one in die.split(",")}
    assert_same(disturbed, undisturbed)


def test_evaluation_gives_the_undisturbed_result_when_workers_die_before_in_and_after_its_collectives(
    tmp_path: Path,
) -> None:
    """Another rank each time, rank 0 included, and the last death in the last evaluation of the run."""
    compare(tmp_path, "before:1:0,in:2:1,after:0:2,in:1:3", "--epochs", "4")


def test_evaluation_gives_the_undisturbed_result_when_it_comes_first_and_between_steps(tmp_path: Path) -> None:
    """Raw collectives of torch.distributed, in `evaluate` and behind the update; a newcomer evaluates by itself."""
    compare(
        tmp_path,
        "before:1:-1,late:2:4,forward:0:8,in:1:10",
        *("--epochs", "2", "--evaluation", "before,start,inside,raw", "--late-collective"),
    )


def test_newcomer_enters_at_the_next_step_when_it_comes_during_an_evaluation(tmp_path: Path) -> None:
    """The evaluation lasts until the replacement is there: it waits, and starts in the next epoch."""
    args = ("--epochs", "3", "--pause-s", "0.05")
    words = ("--die", "before:2:0", "--await-newcomer", "0")
    disturbed = finished(tmp_path / "disturbed", *args, *words, options=("--spares", "0"))
    undisturbed = finished(tmp_path / "undisturbed", *args)
    assert_same(disturbed, undisturbed)
    (newcomer,) = [entry["pid"] for entry in disturbed.ledger("worker_started") if entry["attempt"] == 1]
    entered = [entry for entry in disturbed.told("epoch") if entry["pid"] == newcomer]
    assert entered[0] == {"pid": newcomer, "event": "epoch", "epoch": 1, "run_epoch": 1, "step": 7}
    assert [entry["world_size"] for entry in disturbed.ledger("round")] == [3, 2, 3]
    sizes = {entry["step"]: entry["world_size"] for entry in disturbed.ledger("commit")}
    assert sizes[9] == 3


@pytest.mark.parametrize(
    ("loop", "die", "options"),
    [
        ("break", "draw:1:2,behind:0:3,late:2:6", ()),
        ("limit", "late:1:3,end:0:0,draw:1:7", ()),
        ("range", "late:1:3,end:0:0,in:1:1", ()),
        ("nested", "late:1:2,end:0:0,forward:2:8", ("--samples", "24")),
    ],
)
def test_loop_has_the_undisturbed_outcome_when_workers_die_in_it(
    tmp_path: Path, loop: str, die: str, options: tuple[str, ...]
) -> None:
    """Schedules stepped behind the block and at epoch ends, and an average updated there, are stepped once each."""
    compare(tmp_path, die, "--loop", loop, "--epochs", "2", *options)


def test_run_goes_on_by_itself_when_all_workers_die_at_once(tmp_path: Path) -> None:
    """All three at one moment, before the first checkpoint and after it: the newest one is where it goes on."""
    args = ("--epochs", "2", "--pause-s", "0.02")
    options = ("--checkpoint-every", "4steps")
    disturbed = finished(
        tmp_path / "disturbed",
        *args,
        "--die",
        "forward:0:2,forward:1:2,forward:2:2,late:0:10,late:1:10,late:2:10",
        options=options,
    )
    undisturbed = finished(tmp_path / "undisturbed", *args, options=options)
    assert is_close(disturbed.final(), undisturbed.final())
    assert [entry["step"] for entry in disturbed.ledger("resumed")][-1] == 8
    assert disturbed.results() == undisturbed.results()


def test_ranks_get_every_sample_once_when_shares_are_uneven(tmp_path: Path) -> None:
    """101 samples on 3 ranks in batches of 8, and an evaluation of 10 held-out samples or so on 4 ranks' worth."""
    run = finished(tmp_path, "--samples", "101", "--epochs", "1", "--die", "late:1:12")
    assert_exactly_once(run, num_samples=101, num_epochs=1)
