"""Four machines, as network namespaces, train MNIST over a real etcd: some vanish, are cut off, and come back."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import BINARIES, NO_SERVER
from network import why_not
from support_machines import MEMBERS, SOON_S, Machines, assert_silent_after_fence, assert_whole, run_machines
from waiting import wait_until

pytestmark = [
    pytest.mark.skipif(not BINARIES, reason=NO_SERVER),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.slow,
]


@pytest.fixture
def machines(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Machines]:
    with run_machines(tmp_path, epochs=getattr(request, "param", 12)) as made:
        yield made


def start(machines: Machines, names: str) -> int:
    """Start nodes and wait until they train together; gives their generation."""
    for name in names:
        machines.start(name)
    generation = machines.site.wait_round(len(names))
    machines.site.wait_steps(5)
    return generation


# Rank 0 serves the store of the process group; the last rank has nothing of its own.
@pytest.mark.parametrize(("vanishing", "cut_off"), [(0, -1), (-1, 0)])
def test_machines_vanish_are_cut_off_and_come_back_while_the_rest_train_on(
    machines: Machines, vanishing: int, cut_off: int
) -> None:
    site = machines.site
    whole = start(machines, "abcd")
    before = {name: machines.workers(name) for name in "abcd"}

    first = machines.seats(whole)[vanishing]
    machines.network.vanish(machines.host(first))
    gone_s = machines.wait_lease_end(first)
    three = site.wait_round(3, after=whole)
    seconds = machines.seconds_to_commit(gone_s, three)
    assert seconds < SOON_S
    site.wait_steps(5)

    lost = machines.seats(three)[cut_off]
    machines.network.cut(machines.host(lost))
    gone_s = machines.wait_lease_end(lost)
    two = site.wait_round(2, after=three)
    seconds = machines.seconds_to_commit(gone_s, two)
    assert seconds < SOON_S
    site.wait_steps(5)
    # Without the others it could finish no step, but the one that was in flight.
    newest = max(one["step"] for one in machines.story(lost) if one["event"] == "commit")
    assert newest <= min(one["step"] for one in site.ledger("commit") if one["generation"] == two)

    machines.network.heal(machines.host(lost))
    again = site.wait_round(3, after=two)
    assert machines.seats(again)[-1] == lost, "as one who comes new"
    rest = [name for name in "abcd" if name != first]
    assert_whole(machines, *rest)
    assert_silent_after_fence(machines, lost, three)
    assert {name: machines.workers(name) for name in rest} == {name: before[name] for name in rest}


def test_machine_that_loses_only_etcd_is_left_out_and_comes_back(machines: Machines) -> None:
    site = machines.site
    whole = start(machines, "abc")
    before = {name: machines.workers(name) for name in "abc"}
    lost = machines.seats(whole)[0]
    machines.network.cut(machines.host(lost), machines.network.gateway)
    gone_s = machines.wait_lease_end(lost)
    two = site.wait_round(2, after=whole)
    seconds = machines.seconds_to_commit(gone_s, two)
    assert seconds < SOON_S
    site.wait_steps(5)
    machines.network.heal()
    site.wait_round(3, after=two)
    assert_whole(machines, *"abc")
    assert_silent_after_fence(machines, lost, whole)
    assert {name: machines.workers(name) for name in "abc"} == before


def test_all_machines_that_train_lose_etcd_and_train_on(machines: Machines) -> None:
    site = machines.site
    assert site.etcd is not None
    whole = start(machines, "ab")
    keys = {MEMBERS + node for node in machines.nodes().values()}
    assert keys <= site.etcd.values(MEMBERS).keys()
    machines.start("c")
    for name in "ab":
        machines.network.cut(machines.host(name), machines.network.gateway)
    for name in "ab":
        machines.wait_lease_end(name)
    wait_until(lambda: "may be cut off from it and train on" in site.log("c"), 20, site.logs)
    site.wait_steps(30)
    assert {one["generation"] for one in site.ledger("round")} == {whole}, "nobody has taken their place"
    machines.network.heal()
    site.wait_round(3, after=whole)
    assert_whole(machines, *"abc")
    assert len(machines.workers("a")) == len(machines.workers("b")) == 1


# Rank 0 serves the store to which the others connect first; with the store, it is members that connect to each other.
@pytest.mark.parametrize("machines", [8], indirect=True)
@pytest.mark.parametrize(("dying", "unreachable_for"), [(0, (1, 2)), (2, (1,)), (1, (2,))])
def test_machine_that_vanishes_while_the_others_connect_to_it_is_not_waited_for(
    machines: Machines, dying: int, unreachable_for: tuple[int, ...]
) -> None:
    site = machines.site
    whole = start(machines, "abcd")
    *seats, first = machines.seats(whole)  # of three, in the same order, when the last has gone
    machines.network.vanish(machines.host(first))
    second = seats[dying]
    machines.network.cut(machines.host(second), *(machines.host(seats[rank]).address for rank in unreachable_for))
    three = site.wait_round(3, after=whole)
    assert machines.seats(three) == seats
    threading.Event().wait(0.5)  # all are in the middle of it, and stay there
    machines.network.vanish(machines.host(second))
    gone_s = machines.wait_lease_end(second)
    two = site.wait_round(2, after=three)
    seconds = machines.seconds_to_commit(gone_s, two)
    assert seconds < SOON_S
    rest = [name for name in seats if name != second]
    assert not [one for one in site.ledger("commit") if one["generation"] == three], "it was never complete"
    assert_whole(machines, *rest)
    assert [len(machines.workers(name)) for name in rest] == [1, 1]


def test_machines_have_different_numbers_of_workers_and_one_loses_its_agent(machines: Machines) -> None:
    site = machines.site
    numbers = {"a": 1, "b": 2, "c": 1}
    for name, number in numbers.items():
        machines.start(name, "--nproc-per-node", str(number))
    whole = site.wait_round(4)
    assert Counter(machines.seats(whole)) == numbers
    site.wait_steps(5)
    kept = {name: machines.workers(name) for name in "ac"}
    site.nodes["b"].send_signal(signal.SIGKILL)
    assert site.nodes["b"].wait(10) == -signal.SIGKILL
    wait_until(lambda: not machines.host("b").pids(), 10, "no worker outlives its agent")
    two = site.wait_round(2, after=whole)
    assert Counter(machines.seats(two)) == {"a": 1, "c": 1}
    machines.start("b", "--nproc-per-node", "2")
    again = site.wait_round(4, after=two)
    assert Counter(machines.seats(again)) == numbers
    assert_whole(machines, *"abc", num_workers=4)
    assert {name: machines.workers(name) for name in "ac"} == kept
