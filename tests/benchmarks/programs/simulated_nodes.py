"""Simulated nodes of ours, many to a process: real protocol core, Driver and etcd client; the workers are played.

Reads commands and tells what happened as lines of JSON; `tests/benchmarks/rendezvous.py` starts it. A node has a store
of its own: its own connection, lease and watch. The nodes of a process share the two threads of the etcd client, and
one selector loop that stands for their agents. A played agent answers at once: its worker is warm from the start, parks
when it is fenced or told where to stop, and says its step when it is asked.
"""

from __future__ import annotations

import gc
import heapq
import json
import os
import selectors
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from elastictrain.clock import SystemClock
from elastictrain.rendezvous import events as ev
from elastictrain.rendezvous.driver import Driver
from elastictrain.rendezvous.etcd.opening import open_etcd_store
from elastictrain.rendezvous.etcd.settings import read_etcd_settings
from elastictrain.rendezvous.records import Settings
from elastictrain.topology import Candidate

CLOCK = SystemClock()


@dataclass(eq=False)
class Node:
    """One node: a driver on its own store, and an agent that is played."""

    index: int
    store: Any
    driver: Driver
    entered: int = 0
    step: int = 0
    due_s: float = field(default=0.0)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        node_id = name_of(self.index)
        return (Candidate(worker_id=f"{node_id}.0", node_id=node_id, local_rank=0),)

    def obey(self, output: ev.Output) -> bool:
        """Do what the driver asks for; True when this node's part is over."""
        match output:
            case ev.EnterRound(round=made):
                assert [seat for seat in made.seats if seat.node_id == name_of(self.index)]
                self.entered = made.generation
            case ev.Fence(generation=generation) | ev.StopAt(generation=generation):
                self.step += 1
                self.driver.handle(ev.LocalChanged(candidates=self.candidates, settled=generation))
            case ev.ReportPosition(generation=generation):
                self.driver.handle(ev.LocalPosition(generation=generation, step=self.step + self.index % 7))
            case ev.Left() | ev.RunClosed():
                return True
            case ev.Refused(message=message):
                raise RuntimeError(message)
            case ev.Waiting():
                pass
        return False

    def vanish(self) -> None:
        """Be gone as a killed process is: the connection is closed, and the lease runs out."""
        self.driver._watch.close()
        self.driver._inbox.close()
        self.store.close()


def name_of(index: int) -> str:
    return f"node-{index:05}"


class Nodes:
    """The nodes of this process and their one loop."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.alive: dict[int, Node] = {}
        self.due: list[tuple[float, int]] = []
        self.selector = selectors.DefaultSelector()
        self.told = 0
        self.is_news = False
        self.to_join: deque[int] = deque()

    def join(self, index: int) -> None:
        conf = self.options
        settings = Settings(
            run_id=conf["run_id"],
            min_nodes=1,
            max_nodes=conf["num_nodes"],
            last_call_timeout_s=600.0,
            ttl_s=conf["ttl_s"],
        )
        etcd = read_etcd_settings(conf["endpoint"], {"read_timeout": "30"})
        store = open_etcd_store(etcd, CLOCK)
        driver = Driver(store, settings, clock=CLOCK, node_id=name_of(index), host="127.0.0.1", store_port=29500)
        node = self.alive[index] = Node(index, store, driver)
        self.selector.register(driver, selectors.EVENT_READ, node)
        driver.handle(ev.NodeReady(candidates=node.candidates))
        self.attend(node)

    def attend(self, node: Node) -> None:
        is_over = False
        before = node.entered
        for output in node.driver.poll():
            is_over = node.obey(output) or is_over
        self.is_news = self.is_news or is_over or node.entered != before
        if is_over:
            self.remove(node)
            node.driver.close()
            node.store.close()
            return
        due_s = node.driver.next_deadline_s()
        if due_s is not None and due_s != node.due_s:
            node.due_s = due_s
            heapq.heappush(self.due, (due_s, node.index))

    def remove(self, node: Node) -> None:
        self.selector.unregister(node.driver)
        del self.alive[node.index]

    def serve(self) -> None:
        """Play, until the end of the input."""
        self.selector.register(sys.stdin, selectors.EVENT_READ, None)
        while True:
            limit_s = max(0.0, self.due[0][0] - CLOCK.now_s()) if self.due else None
            if self.to_join:
                self.join(self.to_join.popleft())
                limit_s = 0.0
            for key, _ in self.selector.select(limit_s):
                if key.data is not None:
                    if self.alive.get(key.data.index) is key.data:
                        self.attend(key.data)
                elif not self.command(sys.stdin.readline()):
                    return
            now_s = CLOCK.now_s()
            while self.due and self.due[0][0] <= now_s:
                due_s, index = heapq.heappop(self.due)
                node = self.alive.get(index)
                if node is not None and node.due_s == due_s:
                    self.attend(node)
            self.tell()

    def command(self, line: str) -> bool:
        if not line:
            return False
        asked = json.loads(line)
        match asked["do"]:
            case "join":
                tell(began_s=time.monotonic())
                self.to_join.extend(asked["nodes"])
            case "kill":
                node = self.alive[asked["node"]]
                self.remove(node)
                self.is_news = True
                node.vanish()
                tell(killed_s=time.monotonic())
            case "leave":
                tell(began_s=time.monotonic())
                node = self.alive[asked["node"]]
                node.driver.handle(ev.LeaveRun(reason="benchmark"))
                self.attend(node)
        return True

    def tell(self) -> None:
        """Say when all nodes of this process have entered the same Round."""
        if not self.is_news or self.to_join:
            return
        self.is_news = False
        entered = {node.entered for node in self.alive.values()}
        if len(entered) == 1 and (newest := entered.pop()) > self.told:
            self.told = newest
            tell(generation=newest, at_s=time.monotonic())


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    gc.disable()  # it would walk over all nodes of the process again and again
    nodes = Nodes(json.loads(sys.argv[1]))
    tell(ready=True)
    nodes.serve()
    sys.stdout.flush()
    os._exit(0)  # what is left of a thousand connections need not be taken down


if __name__ == "__main__":
    main()
