"""The only caller of torch.distributed: build, abort and leave a process group, and move numbers and state over it.

gloo has no abort: `ProcessGroupGloo.abort()` frees nothing, and a rank that is not in direct contact with a dead peer
waits for the group's time-out. What ends a collective in flight is `shutdown(2)` on the group's own mesh sockets, so
`build` finds them (TCP sockets that appeared while the group was made and lead to a member) and keeps duplicates.
A duplicate cannot be confused with a descriptor that was closed and given to somebody else meanwhile.
NCCL is aborted with the group's own `abort()`.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from elastictrain.errors import StepAborted
from elastictrain.topology import Round
from elastictrain.worker.building import Build
from elastictrain.worker.destruction import destroy_process_group
from elastictrain.worker.flight import Flights, Pending

GROUP_BUILD_TIMEOUT_S: Final = 5.0
COLLECTIVE_TIMEOUT_S: Final = 1800.0
# A collective whose connections are closed ends within some 10 ms; one that has not ended by then never will.
ABORT_TIMEOUT_S: Final = 0.25
FIRST_BYTES: Final = 1 << 16
LENGTH_BYTES: Final = 8

REDUCTIONS: Final = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def _open_sockets() -> dict[int, int]:
    """Descriptor → inode of every socket of this process."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found[int(name)] = int(target[8:-1])
    return found


def _new_connections(before: set[int]) -> list[socket.socket]:
    """Duplicates of the connected TCP sockets that are not in `before` (inodes).

    Listening sockets are left alone: gloo's acceptor ends the process when its own is shut down.
    """
    found: list[socket.socket] = []
    for fd, inode in _open_sockets().items():
        if inode in before:
            continue
        try:
            duplicate = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue
        try:
            duplicate.getpeername()
            is_tcp = duplicate.family in (socket.AF_INET, socket.AF_INET6)
        except OSError:
            is_tcp = False
        if is_tcp:
            found.append(duplicate)
        else:
            duplicate.close()
    return found


class Communicator:
    """The process group of one generation at a time.

    `abort` may be called from any thread; everything else belongs to the main thread. After `abort` every collective
    raises StepAborted until `build` made the group of the next Round.
    """

    def __init__(self, device: torch.device) -> None:
        self.use_device(device)
        self.generation = 0
        self.rank = 0
        self.world_size = 1
        self.built = False
        self._flights = Flights()
        self._patience: threading.Timer | None = None
        self._aborted_generation = 0
        self._build: Build | None = None
        self._lock = threading.Lock()
        self._mesh: list[socket.socket] = []

    def use_device(self, device: torch.device) -> None:
        """Take `device` for all groups to come; not while there is one."""
        self.device = device
        self.backend = "nccl" if device.type == "cuda" else "gloo"

    def build(self, round_: Round, rank: int) -> None:
        """Make the process group of `round_`; blocks until all its members are here.

        All of them stand still and are told at the same time, so GROUP_BUILD_TIMEOUT_S is enough for each wait on a
        member; gloo tries to connect to one that vanished up to five times that long, if nobody calls `abort`.
        Raises StepAborted when a member did not come or the generation broke meanwhile.
        """
        self.generation, self.rank, self.world_size = round_.generation, rank, round_.world_size
        timeout = timedelta(seconds=GROUP_BUILD_TIMEOUT_S)
        self._build = build = Build(set(_open_sockets().values()))
        try:
            self._raise_if_aborted()
            store = build.make(
                lambda: dist.TCPStore(round_.store_host, round_.store_port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
            )
            before_group = set(_open_sockets().values())
            # torch numbers the groups of a process, puts the number into every key, and starts again only when the
            # default group is destroyed: after a group that could not be built this process would look elsewhere.
            dist.distributed_c10d._world.group_count = 0
            with build.making_gloo():
                dist.init_process_group(
                    self.backend,
                    store=dist.PrefixStore(f"generation/{round_.generation}", store),  # type: ignore[attr-defined]
                    rank=rank,
                    world_size=round_.world_size,
                    timeout=timeout,
                )
            self._keep_mesh(before_group)
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        except (RuntimeError, OSError) as error:
            self.leave()
            raise StepAborted(f"group of generation {round_.generation} not built: {error}") from None
        finally:
            self._build = None
        self.built = True
        self._raise_if_aborted()

    def _raise_if_aborted(self) -> None:
        if self.is_aborted:
            raise StepAborted(f"generation {self.generation} is broken")

    def _keep_mesh(self, before: set[int]) -> None:
        if self.backend != "gloo":
            return
        kept = _new_connections(before)
        with self._lock:
            self._mesh = kept

    def abort(self, generation: int) -> None:
        """End every collective of `generation` in flight, here and by closed connections on the peers; never blocks."""
        self._aborted_generation = max(self._aborted_generation, generation)
        if self.generation > generation:
            return
        build = self._build
        with self._lock:
            for sock in self._mesh:
                with contextlib.suppress(OSError):
                    # Reading only. gloo ends all waits of a connection when it reads end-of-file. But what is in the
                    # socket still is read before that, and if it lets a send begin and the write fails, gloo forgets
                    # that send and its waiter hangs.
                    sock.shutdown(socket.SHUT_RD)
        if build is not None:  # the main thread is inside `build`: wake it, and by the closed connections the others
            for sock in _new_connections(build.before):
                with contextlib.suppress(OSError), sock:
                    sock.shutdown(socket.SHUT_RDWR)
            build.abandon()
        if self.backend == "nccl" and dist.is_initialized():
            dist.distributed_c10d._abort_process_group()
        flights = self._flights
        if flights.begin_ending():
            self._patience = threading.Timer(ABORT_TIMEOUT_S, flights.give_up)
            self._patience.daemon = True
            self._patience.start()

    def leave(self) -> None:
        """Destroy the group and close what was kept of it; its memory goes with `release_groups`. Idempotent."""
        self.built = False
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                destroy_process_group(works=self._flights.take_works(), releases=False)
        self._flights = Flights()
        with self._lock:
            for sock in self._mesh:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()
            self._mesh = []

    def close_in_child(self) -> None:
        """Drop the inherited mesh in a forked child, which must not keep a dead parent's connections open."""
        for sock in self._mesh:
            sock.close()

    @property
    def is_aborted(self) -> bool:
        return self._aborted_generation >= self.generation > 0

    def is_broken(self) -> bool:
        """Whether the group was aborted or a peer closed its connection: tells a secondary error from a first one."""
        if self.is_aborted:
            return True
        with self._lock:
            poll = select.poll()
            for sock in self._mesh:
                poll.register(sock, select.POLLRDHUP)
            return bool(poll.poll(0))

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Make the default group a world of this one process while the block runs, whatever group there is.

        torch.distributed's own calls in the block then neither fail nor reach ranks that do something else.
        """
        real = dist.GroupMember.WORLD
        dist.GroupMember.WORLD = None
        try:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(self.backend, store=store, rank=0, world_size=1)
            yield
        finally:
            own: dist.ProcessGroup | None = (
                dist.distributed_c10d._get_default_group() if dist.is_initialized() else None
            )
            dist.GroupMember.WORLD = real
            if own is not None:
                dist.destroy_process_group(own)

    def has_flights(self) -> bool:
        """Whether one of this rank's collectives is under way. Any thread."""
        return self._flights.has_open()

    def num_collectives(self) -> int:
        """How many collectives the group has begun, those of the script's own calls included."""
        group: Any = dist.GroupMember.WORLD
        if not self.built or group is None or self.world_size == 1:
            return 0
        return int(group._get_sequence_number_for_group())

    def reduce_async(self, tensor: torch.Tensor) -> Pending | None:
        """Start an in-place SUM of `tensor` over all ranks; None in a world of one. The future gives the tensor."""
        if self.world_size == 1:
            return None
        group = dist.group.WORLD
        if group is None:
            raise StepAborted(f"the group of generation {self.generation} is gone")
        # What dist.all_reduce does, without its logging, which costs as much as a small reduction itself.
        return self._flights.track(group.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor]))

    def broadcast_async(self, tensor: torch.Tensor, source: int) -> Pending:
        """Start to send the contiguous `tensor` of rank `source` into that of every rank. Wait for it with `wait`."""
        with self._guard():
            return self._flights.track(dist.broadcast(tensor, source, async_op=True))

    def wait(self, flight: Pending) -> None:
        """Wait for what `reduce_async` or `broadcast_async` started. Raises StepAborted when the group broke."""
        with self._guard():
            flight.wait()

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce `tensor` in place over all ranks and return it; blocks. Raises StepAborted when the group broke."""
        if self.world_size > 1:
            with self._guard():
                reduction = self.reduce_async(tensor) if op in ("sum", "mean") else None
                if reduction is None:
                    reduction = self._flights.track(dist.all_reduce(tensor, op=REDUCTIONS[op], async_op=True))
                reduction.wait()
        if op == "mean":
            tensor.div_(self.world_size)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The same-shaped `tensor` of every rank, by rank; blocks. Raises StepAborted when the group broke."""
        if self.world_size == 1:
            return [tensor.clone()]
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self._guard():
            self._flights.track(dist.all_gather(gathered, tensor, async_op=True)).wait()
        return gathered

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Each rank's `data`, by rank, on every rank; blocks. Raises StepAborted when the group broke."""
        size = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        sizes = [int(other) for other in self.all_gather(size)]
        padded = torch.zeros(max([*sizes, 1]), dtype=torch.uint8, device=self.device)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        gathered = self.all_gather(padded)
        return [bytes(part[:size].cpu().numpy()) for part, size in zip(gathered, sizes, strict=True)]

    def barrier(self) -> None:
        """Wait for every rank. Whoever returns knows that all had arrived."""
        self.all_reduce(torch.zeros(1, device=self.device))

    def broadcast_bytes(self, data: bytes | None, source: int) -> bytes:
        """Send `data` of rank `source` to every rank; blocks. Raises StepAborted when the group broke.

        The length travels with the first FIRST_BYTES, so that what is no longer takes one collective.
        """
        whole = b""
        if data is not None and self.rank == source:
            whole = len(data).to_bytes(LENGTH_BYTES, "little") + data
        with self._guard():
            received = self._broadcast_part(whole[:FIRST_BYTES], FIRST_BYTES, source)
            end = LENGTH_BYTES + int.from_bytes(received[:LENGTH_BYTES], "little")
            if end > FIRST_BYTES:
                received += self._broadcast_part(whole[FIRST_BYTES:], end - FIRST_BYTES, source)
        return received[LENGTH_BYTES:end]

    def _broadcast_part(self, part: bytes, size: int, source: int) -> bytes:
        """`size` bytes of rank `source`; what its `part` lacks is filled up with zeros."""
        buffer = torch.frombuffer(bytearray(part.ljust(size, b"\0")), dtype=torch.uint8).to(self.device)
        self._broadcast(buffer, source)
        return bytes(buffer.cpu().numpy())

    def _broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._flights.track(dist.broadcast(tensor, source, async_op=True)).wait()

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Turn the error of a collective into StepAborted: its cause is another rank's, told by the agent."""
        self._raise_if_aborted()
        try:
            yield
        except RuntimeError as error:
            raise StepAborted(f"collective failed in generation {self.generation}: {error}") from None
