"""Simulated nodes of torch, many to a process: one DynamicRendezvousHandler a thread, each with its own connection to
the TCPStore of the c10d backend. `tests/benchmarks/rendezvous.py` starts it and reads one line of JSON."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler


def main() -> None:
    options: dict[str, Any] = json.loads(sys.argv[1])
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=options["endpoint"],
        run_id=options["run_id"],
        min_nodes=options["num_nodes"],
        max_nodes=options["num_nodes"],
        is_host=False,
    )
    lock, entered, failures = threading.Lock(), [], []

    def play() -> None:
        try:
            backend, store = create_backend(parameters)
            handler = DynamicRendezvousHandler.from_backend(
                options["run_id"], store, backend, options["num_nodes"], options["num_nodes"], "127.0.0.1"
            )
            handler.next_rendezvous()
            with lock:
                entered.append(time.monotonic())
        except Exception as error:  # whatever it is, the figure is void and the reason is printed
            with lock:
                failures.append(repr(error))

    print(json.dumps({"ready": True}), flush=True)
    sys.stdin.readline()
    began_s = time.monotonic()
    threads = [threading.Thread(target=play, daemon=True) for _ in range(options["count"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"began_s": began_s, "at_s": max(entered, default=0.0), "failures": failures[:3]}), flush=True)
    # The nodes of other processes may still be at it, and the first rank's store lies here.
    sys.stdin.readline()
    os._exit(0)


if __name__ == "__main__":
    main()
