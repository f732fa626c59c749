"""A process group in the making is left at once when the generation breaks, whatever torch waits for."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: the constructor that was left goes on in its thread.
CODE = """
import os, threading, time
from datetime import timedelta
import torch, torch.distributed as dist
from elastictrain.worker.building import Build

def make(build, store, world_size):
    dist.distributed_c10d._world.group_count = 0
    with build.making_gloo():
        dist.init_process_group("gloo", store=store, rank=0, world_size=world_size, timeout=timedelta(seconds=60))

original = dist.distributed_c10d.ProcessGroupGloo
build, store = Build(set()), dist.HashStore()
threading.Timer(0.2, build.abandon).start()
began_s = time.monotonic()
try:
    make(build, store, 2)
except RuntimeError as error:
    print(f"left: {error}")
print("soon:", time.monotonic() - began_s < 30)
print("clean:", not dist.is_initialized() and dist.distributed_c10d.ProcessGroupGloo is original)
try:
    build.make(lambda: None)
except RuntimeError:
    print("left again")
make(Build(set()), dist.HashStore(), 1)
total = torch.ones(3)
dist.all_reduce(total)
print("next:", total.tolist(), type(dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))))
try:
    Build(set()).make(lambda: 1 / 0)
except ZeroDivisionError as error:
    print("told:", error)
os._exit(0)
"""


def test_group_in_the_making_is_left_when_its_generation_breaks() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=90, check=False)
    lines = done.stdout.splitlines()
    assert lines[:3] == ["left: given up: the generation is broken", "soon: True", "clean: True"], done.stderr
    assert "left again" in lines
    assert lines[-2].startswith("next: [1.0, 1.0, 1.0] <class")
    assert "ProcessGroupGloo" in lines[-2]
    assert lines[-1] == "told: division by zero"
