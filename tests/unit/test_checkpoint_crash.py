"""SIGKILL at any moment of a save or a deletion: there is always an intact checkpoint, and it is the right one.

One process imports torch once and forks a child for each try; the children are the ones that are killed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from elastictrain.checkpoint import restore
from elastictrain.checkpoint.layout import Condition
from elastictrain.checkpoint.save import save_checkpoint
from elastictrain.clock import SystemClock

NURSERY = '''
import itertools, json, os, signal, sys
from pathlib import Path
import torch
from elastictrain.checkpoint.save import save_checkpoint
from elastictrain.clock import SystemClock

torch.set_num_threads(1)

def state_of(step):
    return {"w": torch.full((60_000,), float(step)), "list": [step] * 100}

def save(directory, step):
    save_checkpoint(Path(directory), state_of(step), step=step, generation=1, run_id="r", cursor={"at": step},
                    world_size=1, keep=1, clock=SystemClock())

def save_forever(directory, first):
    for step in itertools.count(first):
        save(directory, step)
        print(json.dumps({"committed": step}), flush=True)

def save_until_event(directory, step, deadly):
    """Die just before the file system operation number `deadly` below `directory`."""
    seen = 0
    def hook(event, args):
        nonlocal seen
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            seen += 1
            if seen == deadly:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    save(directory, step)

for line in sys.stdin:
    name, *arguments = json.loads(line)
    child = os.fork()
    if child == 0:
        print(json.dumps({"pid": os.getpid()}), flush=True)
        globals()[name](*arguments)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(json.dumps({"ended": os.waitstatus_to_exitcode(status)}), flush=True)
'''


class Nursery:
    def __init__(self, process: subprocess.Popen[str], requests: IO[str], answers: IO[str]) -> None:
        self._process, self._requests, self._answers = process, requests, answers

    def start(self, *request: Any) -> int:
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        return int(self.answer()["pid"])

    def answer(self) -> dict[str, int]:
        return dict(json.loads(self._answers.readline()))


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    command = [sys.executable, "-c", NURSERY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Nursery(process, process.stdin, process.stdout)
        process.stdin.close()
    assert process.returncode == 0


def assert_holds(found: restore.Found) -> None:
    loaded = restore.load_checkpoint(found)
    assert set(loaded.state) == {"w", "list"}
    assert torch.equal(loaded.state["w"], torch.full((60_000,), float(found.step)))  # type: ignore[arg-type]
    assert loaded.state["list"] == [found.step] * 100
    assert loaded.manifest.cursor == {"at": found.step}


def save(directory: Path, step: int, *, keep: int) -> None:
    state = {"w": torch.full((60_000,), float(step)), "list": [step] * 100}
    facts: dict[str, Any] = {"generation": 1, "run_id": "r", "cursor": {"at": step}, "world_size": 1}
    save_checkpoint(directory, state, step=step, keep=keep, clock=SystemClock(), **facts)


def test_newest_committed_checkpoint_loads_exactly_when_saves_are_killed_at_random(
    tmp_path: Path, nursery: Nursery
) -> None:
    chance = random.Random(7)
    save(tmp_path, 0, keep=1)
    newest, num_torn, most_intact = 0, 0, 2
    for _ in range(20):
        pid, newest_before = nursery.start("save_forever", str(tmp_path), newest + 1), newest
        for _ in range(chance.randrange(3)):
            newest = nursery.answer()["committed"]
        threading.Event().wait(chance.uniform(0, 0.02))  # the random moment is what is tested
        os.kill(pid, signal.SIGKILL)
        while "committed" in (answer := nursery.answer()):
            newest = answer["committed"]
        assert answer == {"ended": -signal.SIGKILL}
        # keep=1 leaves two intact ones. Each kill may come between a commit and its deletions and leave one more, until
        # a save comes to its end, as every one that was told has.
        most_intact = 3 if newest > newest_before else most_intact + 1
        num_torn += restore.find_checkpoints(tmp_path)[0].condition is Condition.TORN
        choice = restore.choose_checkpoint(tmp_path)
        # One that was told to be committed is there; one more may have been committed and not told.
        assert newest <= choice.found.step <= newest + 1
        assert all("torn" in problem for _, problem in choice.rejected)
        assert_holds(choice.found)
        newest = choice.found.step
        assert sum(found.manifest is not None for found in restore.find_checkpoints(tmp_path)) <= most_intact
    assert num_torn >= 3, "the kills must land inside saves"


def test_save_and_prune_lose_nothing_when_killed_before_every_operation(tmp_path: Path, nursery: Nursery) -> None:
    prepared = tmp_path / "prepared"
    for step in (10, 20, 30):
        save(prepared, step, keep=9)
    (prepared / "step-0000000015").mkdir()
    (prepared / "step-0000000015" / "state.safetensors").write_bytes(b"half")
    seen: set[tuple[tuple[str, str], ...]] = set()
    for deadly in range(1, 500):
        directory = tmp_path / f"killed-{deadly}"
        shutil.copytree(prepared, directory)
        nursery.start("save_until_event", str(directory), 40, deadly)
        ended = nursery.answer()["ended"]
        found = restore.find_checkpoints(directory)
        seen.add(tuple((each.path.name, each.condition.value) for each in found))
        assert not [each for each in found if each.condition is Condition.DAMAGED], "half a checkpoint"
        choice = restore.choose_checkpoint(directory)
        assert choice.found.step in (30, 40)
        assert_holds(choice.found)
        intact = [each for each in found if each.condition is Condition.INTACT]
        assert len(intact) >= 2
        assert [restore.verify_checkpoint(each) for each in intact] == [None] * len(intact)
        # The next save of the same step begins a folder of its own, and leaves no garbage behind.
        save(directory, 40, keep=1)
        assert_holds(restore.choose_checkpoint(directory).found)
        assert sorted(os.listdir(directory)) == sorted(each.path.name for each in restore.find_checkpoints(directory))
        assert [each.condition for each in restore.find_checkpoints(directory)] == [Condition.INTACT] * 2
        shutil.rmtree(directory)
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
    assert ended == 0, "the save never came to its end"
    shapes = [dict(each) for each in seen]
    assert any(shape.get("step-0000000040") == "torn" for shape in shapes), "killed before the commit"
    assert any(shape.get("step-0000000010") == "torn" for shape in shapes), "killed inside a deletion"
    assert any("step-0000000010" not in shape and "step-0000000020" in shape for shape in shapes), "and between two"
