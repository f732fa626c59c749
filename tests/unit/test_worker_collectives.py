"""What a worker sends to the others arrives whole, and the groups that it has left do not pile up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from elastictrain.worker.collectives import FIRST_BYTES, LENGTH_BYTES

BROADCAST = """
import os, random, sys
import torch, torch.distributed as dist
from elastictrain.worker.collectives import Communicator

rank, path, sizes = int(sys.argv[1]), sys.argv[2], [int(word) for word in sys.argv[3:]]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
comm = Communicator(torch.device("cpu"))
comm.generation, comm.rank, comm.world_size = 1, rank, 2
for number, size in enumerate(sizes):
    data = random.Random(size).randbytes(size)
    source = number % 2
    assert comm.broadcast_bytes(data if rank == source else None, source) == data, size
print("all there", flush=True)
os._exit(0)
"""

LEAVE = """
import os, socket, threading, types
import torch, torch.distributed as dist
from elastictrain.channel import AGENT_KINDS, WORKER_KINDS, Channel
from elastictrain.topology import Round, Seat
from elastictrain.worker.collectives import Communicator
from elastictrain.worker.control import Control
from elastictrain.worker.destruction import make_destruction_safe
from elastictrain.worker.recovery import agree

make_destruction_safe()
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
seats = (Seat(rank=0, worker_id="a-0-0", node_id="a", local_rank=0, stream=0),)
agents_end, workers_end = socket.socketpair()
heard = threading.Event()

def play_agent():
    channel = Channel(agents_end, accepts=WORKER_KINDS, waits=True)
    while (messages := channel.receive()) is not None:
        for message in messages:
            if message["kind"] == "hello":
                channel.send("welcome")
                continue
            assert message["kind"] == "parked", message
            heard.set()
            generation = message["generation"] + 1
            made = Round(
                generation=generation, seats=seats, store_host="127.0.0.1", store_port=store.port, reason="start"
            )
            channel.send("round", round=made.to_json())

threading.Thread(target=play_agent, daemon=True).start()
comm = Communicator(torch.device("cpu"))
control = Control(Channel(workers_end, accepts=AGENT_KINDS, waits=True), comm)
control.start()
worker = types.SimpleNamespace(
    _control=control, _worker_id="a-0-0", _checkpointer=types.SimpleNamespace(save_standing=None)
)
was_heard = []
made = control.wait_round("a-0-0", {"step": 0}, save=None, meanwhile=lambda: was_heard.append(heard.wait(10)))
threads = []
for _ in range(8):
    comm.build(made, 0)
    comm.leave()
    threads.append(len(os.listdir("/proc/self/task")))
    made = agree(worker, {"step": 0})
assert was_heard == [True], "the agent is told first: the others wait for that, and for nothing else"
assert made.generation == 9
assert max(threads[3:]) <= threads[2], threads
print("given back", flush=True)
os._exit(0)
"""


def test_bytes_arrive_whole_when_they_fit_into_one_part_and_when_they_do_not(tmp_path: Path) -> None:
    fits = FIRST_BYTES - LENGTH_BYTES
    sizes = [str(size) for size in (0, 1, fits - 1, fits, fits + 1, 5 * FIRST_BYTES)]
    words = [sys.executable, "-c", BROADCAST]
    other = subprocess.Popen([*words, "1", str(tmp_path / "store"), *sizes])
    try:
        done = subprocess.run(
            [*words, "0", str(tmp_path / "store"), *sizes], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.stdout == "all there\n", done.stderr
        assert other.wait(10) == 0
    finally:
        other.kill()
        other.wait()


def test_left_groups_are_given_back_when_the_worker_waits_for_the_next_round() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "given back\n", done.stderr
