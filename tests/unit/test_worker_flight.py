"""A collective that the transport never finishes still lets go of whoever waits for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys, threading
import torch, torch.distributed as dist
from elastictrain.worker.destruction import destroy_process_group
from elastictrain.worker.flight import Flights

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
if rank == 1:
    sys.stdin.read()  # never takes part
    os._exit(0)
flights = Flights()
pending = flights.track(dist.all_reduce(torch.ones(3), async_op=True))
assert flights.begin_ending() and not flights.begin_ending()
threading.Timer(0.2, flights.give_up).start()
try:
    pending.wait()
except RuntimeError as error:
    print(error)
try:
    flights.track(dist.all_reduce(torch.ones(3), async_op=True)).wait()
except RuntimeError as error:
    print("late one:", error)
works = flights.take_works()
assert len(works) == 2
destroy_process_group(works=works)  # must not join the thread that is still in the collective
print("destroyed", flush=True)
os._exit(0)
"""


def test_waiter_is_freed_when_a_collective_is_given_up(tmp_path: Path) -> None:
    words = [sys.executable, "-c", PROGRAM]
    silent = subprocess.Popen([*words, "1", str(tmp_path / "store")], stdin=subprocess.PIPE)
    try:
        done = subprocess.run(
            [*words, "0", str(tmp_path / "store")], capture_output=True, text=True, timeout=60, check=False
        )
    finally:
        silent.kill()
        silent.communicate()
    assert "given up: the generation is broken" in done.stdout, done.stderr
    assert "late one:" in done.stdout, "a collective that begins after the end does not wait either"
    assert done.stdout.splitlines()[-1] == "destroyed", done.stderr
