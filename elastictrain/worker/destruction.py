"""Destroying process groups without the deadlock that torch has there.

The destructor of a gloo group joins the group's threads while it holds the GIL, and such a thread may just need the GIL
to let go of the tensors of the last collective: both wait for ever. It hits a program that ends, or leaves the function
that holds its model, right after a collective. So a destroyed group is kept for one more life: its threads are idle by
the time the next one is destroyed, and a worker ends without destructors.

Giving a group's memory back takes 5 to 10 ms, for its threads to end. A worker that leaves a generation does it with
`release_groups`, while it waits for the next Round.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import torch.distributed as dist

_kept: Final[list[tuple[list[Any], Sequence[Any]]]] = []
_original: Final = dist.distributed_c10d.destroy_process_group


@functools.wraps(_original)
def destroy_process_group(group: Any = None, *, works: Sequence[Any] = (), releases: bool = True) -> None:
    """torch's own function, but for the moment at which the memory of the groups is given back.

    `works` are collectives that have not ended: while one has not, its thread is not idle and its group is kept. With
    `releases=False` the groups of before are kept as well, until `release_groups`.
    """
    groups = list(dist.distributed_c10d._world.pg_map)
    _original(group)
    _kept.append((groups, works))
    if releases:
        release_groups()


def release_groups() -> None:
    """Give back the memory of all destroyed groups but the newest, and but those that still work on a collective."""
    _kept[:-1] = [entry for entry in _kept[:-1] if not all(work.is_completed() for work in entry[1])]


def make_destruction_safe() -> None:
    """Let every caller in this process destroy groups this way. Idempotent."""
    dist.destroy_process_group = destroy_process_group
    dist.distributed_c10d.destroy_process_group = destroy_process_group
