"""What a failure costs: elastictrain, torchrun with a checkpoint in each step, and torchft, in one call.

    python tests/benchmarks/recovery.py [--kills 10] [--only CASE ...]
        [--no-rivals] [--sides NAME ...] [--rival-kills N] [--scratch DIR] [--json FILE]

worker      SIGKILL of one of 3 workers on one node, each rank in turn
worker-twice    SIGKILL of one of 4 workers, and of another up to 0.1 s later (elastictrain only)
node        SIGKILL of an agent and its workers, 2 nodes of 2 workers, lease of 10 s; then the node comes back
node-short  the same with a lease of 2 s (elastictrain only: the rivals have no such setting beside their tuned rows)
visits      a fresh node joins one that trains, then one of the two gets SIGTERM; nodes of 2 workers
visits-one  the same with nodes of 1 worker: two processes that train, as many as a small machine has cores
visits-200MB    the same as visits with a model and optimizer of 200 MB
hang        SIGSTOP of one of 3 workers
partition   one of 2 nodes of 2 workers is cut off without a word, lease of 10 s; then the cut is healed. Each node is a
            network namespace: needs root, iproute2 and nftables

All times are read from the lines that the training scripts write for each committed step. A step waits 20 ms for a
computation that takes no processor; the step that a failure undid is part of the time. A pause is the time between
two commits of a worker, less a usual step. Rivals run in environments that are made in --scratch, each with its
defaults and with the shortest waits that it takes ("tuned", "tight"); no step within the limit counts as hung.
Other work on the machine shows in the figures: let it be idle, and look at the maxima.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from commit_times import Before
from failure_sites import SITES, ElasticSite, Layout, Site
from recovery_report import OURS, Outcome, Results, stage_table, table
from rival_environment import make_environment

START_LIMIT_S = 60.0
STEP_S = 0.02
SECOND_KILL_SPREAD_S = 0.1

_pause = threading.Event()


class HungError(Exception):
    """No step was committed within the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of event: who trains, what `once` does to them, and how long to wait for the next step."""

    layout: Layout
    num_nodes_first: int
    limit_s: float
    once: Callable[[Site, int, Outcome, float], None]
    sides: tuple[str, ...] = tuple(SITES)


def kill_worker(
    site: Site, number: int, outcome: Outcome, limit_s: float, how: signal.Signals = signal.SIGKILL
) -> None:
    """Signal one worker and wait until the world is whole again."""
    size = site.layout.world_size
    victim = site.worker(number % size)
    before = site.times.now()
    os.kill(victim.pid, how)
    went_on = site.times.wait(lambda: site.times.first_after(before) is not None, limit_s)
    if how is signal.SIGSTOP and not isinstance(site, ElasticSite):
        os.kill(victim.pid, signal.SIGKILL)  # nobody else would
    if not went_on:
        raise HungError
    outcome.add("next", site.times.first_after(before))
    if not site.times.wait_world(size, after_s=before.at_s, limit_s=limit_s):
        raise HungError
    outcome.add("whole", site.times.first_after(before, world=size))
    outcome.add_stages("lost", site.stages_after(before.at_s))


def kill_two(site: Site, number: int, outcome: Outcome, limit_s: float) -> None:
    """Kill a worker, and another a moment later, while the others may be connecting."""
    size = site.layout.world_size
    seats = (number % size, (number + 1) % size)
    before = site.times.now()
    os.kill(site.worker(seats[0]).pid, signal.SIGKILL)
    _pause.wait((number * 7 % 20) * SECOND_KILL_SPREAD_S / 20)
    os.kill(site.worker(seats[1]).pid, signal.SIGKILL)
    if not site.times.wait_world(size, after_s=time.monotonic(), limit_s=limit_s):
        raise HungError
    outcome.add("pause", site.times.longest_gap(before, set(training_nodes(site)), without_seats=seats))
    outcome.add_stages("lost", site.stages_after(before.at_s))


def stop_worker(site: Site, number: int, outcome: Outcome, limit_s: float) -> None:
    kill_worker(site, number, outcome, limit_s, signal.SIGSTOP)


def kill_node(site: Site, number: int, outcome: Outcome, limit_s: float) -> None:
    """Kill the older or the newer node, then start a fresh one."""
    victim = training_nodes(site)[number % 2]
    before = site.times.now()
    site.kill_node(victim)
    lose_node(site, before, outcome, limit_s)
    site.forget(victim)
    take_in(site, outcome, limit_s, "return")


def cut_node(site: Site, number: int, outcome: Outcome, limit_s: float) -> None:
    """Cut the older or the newer node off from everybody, then heal the cut."""
    size, names = site.layout.world_size, training_nodes(site)
    stayers = set(names) - {names[number % 2]}
    before = site.times.now()
    site.cut_off(names[number % 2])
    lose_node(site, before, outcome, limit_s)
    before = site.times.now()
    site.heal()
    if not site.times.wait_world(size, after_s=before.at_s, limit_s=limit_s):
        raise HungError
    outcome.add("heal_whole", site.times.first_after(before, world=size))
    outcome.add("heal_gap", site.times.longest_gap(before, stayers))
    outcome.add_stages("heal", site.stages_after(before.at_s))


def lose_node(site: Site, before: Before, outcome: Outcome, limit_s: float) -> None:
    """Wait until the others train without a node that went at `before`."""
    per_node = site.layout.per_node
    if not site.times.wait_world(per_node, after_s=before.at_s, limit_s=limit_s):
        raise HungError
    next_s = site.times.first_after(before, world=per_node)
    outcome.add("next", next_s)
    known_s = site.known_after(before.at_s)
    if known_s is not None and next_s is not None:
        outcome.add("known", known_s - before.at_s)
        outcome.add("after", next_s - (known_s - before.at_s))
    outcome.add_stages("lost", site.stages_after(before.at_s))


def take_in(site: Site, outcome: Outcome, limit_s: float, name: str) -> None:
    """Start a fresh node beside one that trains."""
    size, stayers = site.layout.world_size, set(training_nodes(site))
    before = site.times.now()
    site.start_node()
    if not site.times.wait_world(size, after_s=before.at_s, limit_s=limit_s):
        raise HungError
    outcome.add(f"{name}_whole", site.times.first_after(before, world=size))
    outcome.add(f"{name}_gap", site.times.longest_gap(before, stayers))
    outcome.add(f"{name}_change", site.times.gap_at_change(before, stayers, world=size))
    outcome.add_stages(name, site.stages_after(before.at_s))


def visit(site: Site, number: int, outcome: Outcome, limit_s: float) -> None:
    """A fresh node joins, then the older or the newer one is told to leave."""
    take_in(site, outcome, limit_s, "join")
    names = training_nodes(site)
    leaver = names[number % 2]
    before = site.times.now()
    site.tell_to_leave(leaver)
    if not site.times.wait_world(site.layout.per_node, after_s=before.at_s, limit_s=limit_s):
        raise HungError
    outcome.add("leave_gap", site.times.longest_gap(before, set(names) - {leaver}))
    outcome.add_stages("leave", site.stages_after(before.at_s))
    site.forget(leaver)


def training_nodes(site: Site) -> list[str]:
    """The nodes that train, oldest first; not the store or the lighthouse beside them."""
    return [name for name in site.nodes if name.startswith("node")]


def cases() -> dict[str, Case]:
    three = Layout(num_nodes=1, per_node=3, model="small", step_s=STEP_S)
    two_nodes = Layout(num_nodes=2, per_node=2, model="small", step_s=STEP_S)
    short = Layout(num_nodes=2, per_node=2, model="small", step_s=STEP_S, ttl_s=2.0)
    big = Layout(num_nodes=2, per_node=2, model="200MB", step_s=STEP_S)
    one = Layout(num_nodes=2, per_node=1, model="small", step_s=STEP_S)
    four = Layout(num_nodes=1, per_node=4, model="small", step_s=STEP_S)
    hang = Layout(num_nodes=1, per_node=3, model="small", step_s=STEP_S, hang_timeout_s=2.0)
    apart = Layout(num_nodes=2, per_node=2, model="small", step_s=STEP_S, is_apart=True)
    return {
        "worker": Case(layout=three, num_nodes_first=1, limit_s=20.0, once=kill_worker),
        "worker-twice": Case(layout=four, num_nodes_first=1, limit_s=60.0, once=kill_two, sides=(OURS,)),
        "node": Case(layout=two_nodes, num_nodes_first=2, limit_s=100.0, once=kill_node),
        "node-short": Case(layout=short, num_nodes_first=2, limit_s=100.0, once=kill_node, sides=(OURS,)),
        "visits": Case(layout=two_nodes, num_nodes_first=1, limit_s=100.0, once=visit),
        "visits-one": Case(layout=one, num_nodes_first=1, limit_s=100.0, once=visit),
        "visits-200MB": Case(layout=big, num_nodes_first=1, limit_s=100.0, once=visit),
        "hang": Case(layout=hang, num_nodes_first=1, limit_s=80.0, once=stop_worker),
        "partition": Case(layout=apart, num_nodes_first=2, limit_s=100.0, once=cut_node),
    }


def start_site(case: Case, side: str, bin_folder: Path) -> Site:
    """Start the first nodes and wait until all train."""
    site = SITES[side](case.layout, bin_folder)
    with contextlib.ExitStack() as undo:
        undo.callback(site.close)
        for _ in range(case.num_nodes_first):
            site.start_node()
        size = case.num_nodes_first * case.layout.per_node
        if not site.times.wait_world(size, after_s=0.0, limit_s=START_LIMIT_S):
            raise RuntimeError(f"{side} did not begin to train within {START_LIMIT_S:.0f} s:\n{site.said()}")
        undo.pop_all()
    return site


def measure(name: str, case: Case, side: str, *, tries: int, bin_folder: Path) -> Outcome:
    """Let the event happen `tries` times; a run that hangs is ended, counted, and started anew."""
    outcome, site = Outcome(), None
    try:
        for number in range(tries):
            site = site or start_site(case, side, bin_folder)
            outcome.tries += 1
            try:
                case.once(site, number, outcome, case.limit_s)
            except HungError:
                outcome.hung += 1
                print(
                    f"{name}, {side}: try {number + 1} hung" + (f"\n{site.said()}" if side == OURS else ""), flush=True
                )
                site.close()
                site = None
    finally:
        if site is not None:
            site.close()
    told = {value: [round(one, 3) for one in seconds] for value, seconds in outcome.seconds.items()}
    print(f"{name}, {side}: {told}, hung {outcome.hung} of {outcome.tries}", flush=True)
    return outcome


def main() -> None:
    known = cases()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=10, help="events of each case for elastictrain")
    parser.add_argument("--rival-kills", type=int, help="for each of the others (default: as many)")
    parser.add_argument("--only", nargs="*", choices=list(known), default=list(known), help="only these cases")
    parser.add_argument("--rivals", action=argparse.BooleanOptionalAction, default=True, help="measure the others too")
    parser.add_argument("--sides", nargs="*", choices=list(SITES), default=list(SITES), help="only these")
    parser.add_argument(
        "--scratch", type=Path, default=Path(tempfile.gettempdir()) / "elastictrain-rivals", help="for their packages"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures here, beside those that it holds")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left running
    options.scratch.mkdir(parents=True, exist_ok=True)
    results: Results = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    sides = [side for side in options.sides if side == OURS or options.rivals]
    for name in options.only:
        for side in (side for side in sides if side in known[name].sides):
            bins = Path() if side == OURS else make_environment(options.scratch, side.partition("-")[0])
            tries = options.kills if side == OURS or options.rival_kills is None else options.rival_kills
            outcome = measure(name, known[name], side, tries=tries, bin_folder=bins)
            results.setdefault(name, {})[side] = outcome.to_json()
            if options.json:
                options.json.write_text(json.dumps(results))
    seen = [side for side in SITES if any(side in by_side for by_side in results.values())]
    print("\n".join(["", *table(results, seen), "", *stage_table(results)]))
    if not options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
