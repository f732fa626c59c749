"""Buffers: each rank's forward changes them by its own samples, and once a step all ranks agree on the mean.

The exchange is small, and waiting for it is what it costs. So it starts with the first gradients of the backward pass,
when forward has usually changed what it will, and ends before the update. Whether that holds for a script is found
out: in the first PROBATION_STEPS steps of a group the exchange comes last, and carries a mark of every rank on which a
buffer changed after the first gradients (as gradient checkpointing does, or code of the script's own). All ranks see
the sum of the marks, so all start early in the same step, or none; after a mark not for PATIENCE_STEPS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from elastictrain.worker.collectives import Communicator
from elastictrain.worker.flight import Pending

PROBATION_STEPS: Final = 3
PATIENCE_STEPS: Final = 1000


class FlatCopy:
    """A private copy of tensors, flat by type and device: a few operations for any number of small tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, tensor in enumerate(tensors):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
        self.parts = [(indices, _flatten(tensors, indices)) for indices in kinds.values()]

    @property
    def floats(self) -> list[tuple[list[int], torch.Tensor]]:
        """Indices and flat copy of the floating-point tensors, by type and device."""
        return [(indices, flat) for indices, flat in self.parts if flat.is_floating_point()]

    def put_back(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give `tensors`, the same as at the start, the copied values."""
        for indices, flat in self.parts:
            _unflatten(tensors, indices, flat)


@torch.no_grad()
def _flatten(tensors: Sequence[torch.Tensor], indices: Sequence[int]) -> torch.Tensor:
    return torch.cat([tensors[index].reshape(-1) for index in indices])


@torch.no_grad()
def _unflatten(tensors: Sequence[torch.Tensor], indices: Sequence[int], flat: torch.Tensor) -> None:
    chosen = [tensors[index] for index in indices]
    pieces = torch.split(flat, [tensor.numel() for tensor in chosen])
    torch._foreach_copy_(chosen, [piece.view(tensor.shape) for piece, tensor in zip(pieces, chosen, strict=True)])


class BufferReduction:
    """The exchange of one attempt after the other: `begin`, `start` from the first gradient bucket, `finish`.

    A float buffer becomes its value at the step's start plus the weighted mean of the ranks' changes; one that nobody
    changed keeps its bits. Others stay each rank's own: they count steps, and are equal without an exchange.
    """

    def __init__(self, comm: Communicator, buffers: Callable[[], list[torch.Tensor]]) -> None:
        self._comm = comm
        self._buffers = buffers
        self._num_quiet = 0
        self._has_changed_late = False
        self._before = FlatCopy([])
        self._agreed: list[torch.Tensor] | None = None
        self._weight: Callable[[], float] = lambda: 1.0
        self._versions: list[int] | None = None
        self._sent: list[torch.Tensor] = []
        self._sums: torch.Tensor | None = None
        self._flight: Pending | None = None

    def regroup(self) -> None:
        """There is a new group: its ranks begin alike, without what one of them has kept for itself."""
        if self._agreed is not None:
            for (indices, _), flat in zip(self._before.floats, self._agreed, strict=True):
                _unflatten(self._buffers(), indices, flat)
        self._num_quiet, self._has_changed_late, self._agreed = 0, False, None

    def begin(self, before: FlatCopy, weight: Callable[[], float]) -> None:
        """An attempt begins; `weight()` is this rank's part of the mean, asked when the exchange starts."""
        self._before, self._weight = before, weight
        self._versions = self._sums = self._flight = None

    def start(self) -> None:
        """The first gradients of this rank are complete. Does not wait. Raises StepAborted when the group is gone."""
        if self._versions is not None or self._comm.world_size == 1:
            return
        now = self._buffers()
        self._versions = [buffer._version for buffer in now]
        # Elsewhere looking at the marks would make the host wait for the device, for a wait that does not exist there.
        is_worthwhile = self._comm.device.type == "cpu" and bool(self._before.floats)
        if is_worthwhile and self._num_quiet >= PROBATION_STEPS:
            self._launch(now, mark=self._has_changed_late)

    def finish(self) -> bool:
        """Give every float buffer its mean; blocks. False when there was nothing to exchange. Raises StepAborted."""
        if self._comm.world_size == 1 or not self._before.floats:
            return False
        now = self._buffers()
        has_changed_late = self._versions is not None and self._versions != [buffer._version for buffer in now]
        was_early = self._sums is not None
        if not was_early:
            self._launch(now, mark=has_changed_late)
        is_quiet = self._land()
        if was_early and not is_quiet:  # every rank knows by now that what was sent in the middle is not the whole
            self._launch(now, mark=False)
            self._land()
        self._num_quiet = self._num_quiet + 1 if is_quiet else -PATIENCE_STEPS
        # The first time in this group: the change stays on top of what is agreed, this rank's own, for one step. Then
        # the marks tell all ranks, and it takes part in the mean.
        self._has_changed_late = was_early and is_quiet and has_changed_late
        self._agreed = self._set_means(now, keeps_late=self._has_changed_late)
        return True

    def _bases(self) -> list[torch.Tensor]:
        """Flat values that all ranks share, from which the changes count: by type, those at the attempt's start."""
        return self._agreed if self._agreed is not None else [flat for _, flat in self._before.floats]

    @torch.no_grad()
    def _launch(self, now: list[torch.Tensor], *, mark: bool) -> None:
        self._sent = [_flatten(now, indices) for indices, _ in self._before.floats]
        changes = [(sent - base).to(torch.float64) for sent, base in zip(self._sent, self._bases(), strict=True)]
        self._sums = torch.cat([*changes, torch.full((1,), float(mark), dtype=torch.float64, device=changes[0].device)])
        self._sums[:-1].mul_(self._weight())
        self._flight = self._comm.reduce_async(self._sums)

    def _land(self) -> bool:
        """Wait for the sums. False when a rank has marked its part, True also where nobody looks at the marks."""
        assert self._flight is not None
        assert self._sums is not None
        self._comm.wait(self._flight)
        return self._comm.device.type != "cpu" or not float(self._sums[-1])

    @torch.no_grad()
    def _set_means(self, now: list[torch.Tensor], *, keeps_late: bool) -> list[torch.Tensor] | None:
        """Give the buffers their new values; what is agreed, where that is not the same."""
        assert self._sums is not None
        agreed: list[torch.Tensor] = []
        offset = 0
        for (indices, _), base, sent in zip(self._before.floats, self._bases(), self._sent, strict=True):
            agreed.append(base + self._sums[offset : offset + base.numel()].to(base.dtype))
            offset += base.numel()
            _unflatten(now, indices, agreed[-1] + (_flatten(now, indices) - sent) if keeps_late else agreed[-1])
        return agreed if keeps_late else None
