"""One machine's wall clock is wrong by minutes, or jumps: nobody notices. Its monotonic clock is right, as always."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from etcd_server import BINARIES, NO_SERVER
from network import why_not
from support_machines import SOON_S, Machines, assert_whole, run_machines

EPOCHS = 8
SHIFT_S = 300.0
LIBRARY = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)

pytestmark = [
    pytest.mark.skipif(not BINARIES, reason=NO_SERVER),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.skipif(LIBRARY is None, reason="no libfaketime here: apt-get install faketime"),
    pytest.mark.slow,
]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with run_machines(tmp_path, epochs=EPOCHS) as made:
        yield made
    for path in Path("/dev/shm").glob("*faketime_*"):  # the library leaves those of its processes that were killed
        if not Path(f"/proc/{path.name.rpartition('_')[2]}").exists():
            path.unlink(missing_ok=True)


class WallClock:
    """The wall clock of one machine: that of this one, and an offset."""

    def __init__(self, folder: Path, offset: str) -> None:
        self._file = folder / "offset"
        self.shift(offset)

    @property
    def environ(self) -> dict[str, str]:
        library = {"LD_PRELOAD": str(LIBRARY), "DONT_FAKE_MONOTONIC": "1"}
        return {**library, "FAKETIME_TIMESTAMP_FILE": str(self._file), "FAKETIME_NO_CACHE": "1"}

    def shift(self, offset: str) -> None:
        """Change the offset, also of what runs already, at once."""
        fresh = self._file.with_suffix(".new")
        fresh.write_text(f"{offset}\n")
        fresh.replace(self._file)


def start(machines: Machines, wrong: WallClock) -> int:
    for name in "abc":
        machines.start(name, environ=wrong.environ if name == "b" else None)
    whole = machines.site.wait_round(3)
    machines.site.wait_steps(10)
    return whole


def lose_one_and_end(machines: Machines, whole: int) -> None:
    """Leases run out by no wall clock: c is lost, and only c."""
    site = machines.site
    assert {one["generation"] for one in site.ledger("round")} == {whole}, "nobody was left out so far"
    kept = {name: machines.workers(name) for name in "ab"}
    machines.network.vanish(machines.host("c"))
    vanished_s = time.monotonic()
    gone_s = machines.wait_lease_end("c")
    assert gone_s - vanished_s < 10.0
    two = site.wait_round(2, after=whole)
    seconds = machines.seconds_to_commit(gone_s, two)
    assert seconds < SOON_S
    assert_whole(machines, *"ab")
    assert {one["generation"] for one in site.ledger("round")} == {whole, two}
    assert {name: machines.workers(name) for name in "ab"} == kept


@pytest.mark.parametrize("offset_s", [SHIFT_S, -SHIFT_S])
def test_nothing_changes_when_the_clock_of_one_machine_is_wrong(
    machines: Machines, tmp_path: Path, offset_s: float
) -> None:
    whole = start(machines, WallClock(tmp_path, f"{offset_s:+.0f}s"))
    walls = {name: machines.story(name)[0]["wall"] for name in "abc"}
    assert abs(walls["b"] - walls["a"] - offset_s) < SHIFT_S / 2, "the clock is wrong indeed"
    lose_one_and_end(machines, whole)


def test_nothing_changes_when_the_clock_of_one_machine_jumps_while_it_trains(
    machines: Machines, tmp_path: Path
) -> None:
    clock = WallClock(tmp_path, "+0s")
    whole = start(machines, clock)
    for offset_s in (SHIFT_S, -SHIFT_S):
        clock.shift(f"{offset_s:+.0f}s")
        machines.site.wait_steps(20)
    lose_one_and_end(machines, whole)
    story = machines.story("b")
    jumps = [later["wall"] - earlier["wall"] for earlier, later in pairwise(story)]
    assert max(jumps) > SHIFT_S / 2, "it went forward"
    assert min(jumps) < -SHIFT_S, "and back"
    assert all(later["mono"] >= earlier["mono"] for earlier, later in pairwise(story))
