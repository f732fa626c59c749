"""A state that is sent arrives whole, whatever its tensors are like, also past a rank that needs nothing of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from elastictrain.worker.transfer import ALIGN_BYTES, LARGE_BYTES, SLICE_BYTES, plan

SIZES = st.one_of(
    st.integers(0, 64), st.integers(0, 2 * LARGE_BYTES), st.integers(SLICE_BYTES - 1, 3 * SLICE_BYTES + 1)
)


@given(st.lists(SIZES, max_size=200))
def test_plan_carries_every_byte_once_in_pieces_of_bounded_size(sizes: list[int]) -> None:
    pieces = plan(sizes)
    reached = [0] * len(sizes)
    for piece in pieces:
        assert 0 < piece.num_bytes <= SLICE_BYTES
        ends = 0
        for part in piece.parts:
            assert part.place % ALIGN_BYTES == 0, "a value of any type may lie there"
            assert part.place >= ends, "beside the one before"
            ends = part.place + part.length
            assert part.first == reached[part.number], "in order, without a gap"
            reached[part.number] += part.length
    assert reached == sizes
    small = sum(-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes if size < LARGE_BYTES)
    large = sum(-(-size // SLICE_BYTES) for size in sizes if size >= LARGE_BYTES)
    assert len(pieces) <= large + 1 + 2 * small // SLICE_BYTES, "small ones travel together"


BROADCAST = """
import os, random, sys
import torch, torch.distributed as dist
from elastictrain.worker import transfer
from elastictrain.worker.collectives import Communicator

transfer.SLICE_BYTES, transfer.LARGE_BYTES = 5000, 300
rank, path = int(sys.argv[1]), sys.argv[2]
torch.use_deterministic_algorithms(True)  # fills fresh memory, so that nothing is right by chance
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=3)
comm = Communicator(torch.device("cpu"))
comm.generation, comm.rank, comm.world_size = 1, rank, 3
types = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64]
for attempt in range(30):
    rng = random.Random(attempt)
    shapes = [[rng.randrange(1, 40) for _ in range(rng.randrange(0, 4))] for _ in range(rng.randrange(0, 40))]
    shapes += [[0], [4999], [5000], [12345]] * rng.randrange(2)
    generator = torch.Generator().manual_seed(attempt)
    sent = [
        torch.randint(0, 2 if one is torch.bool else 100, shape, generator=generator).to(one)
        for shape in shapes
        for one in [rng.choice(types)]
    ]
    sizes = [tensor.numel() * tensor.element_size() for tensor in sent]
    source = attempt % 3
    idle = rng.choice([(source + 1) % 3, None])
    before = [tensor.clone() for tensor in sent]
    tensors = sent if rank == source else None if rank == idle else [torch.empty_like(tensor) for tensor in sent]
    transfer.broadcast(comm, tensors, sizes, source)
    assert tensors is None or all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True)), attempt
print("all there", flush=True)
os._exit(0)
"""


def test_tensors_of_all_types_and_sizes_arrive_as_they_were(tmp_path: Path) -> None:
    words = [sys.executable, "-c", BROADCAST]
    ranks = [
        subprocess.Popen([*words, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(3)
    ]
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=90)
            assert out == b"all there\n", err.decode()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
