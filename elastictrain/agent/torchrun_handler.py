"""`torchrun --rdzv-backend=etcd3`: the rendezvous on etcd v3 for torch's own agent, found through its entry point.

torch's agent knows nothing of workers that survive: every change of membership restarts the workers of all nodes, as it
does with torch's own backends. What it gains is etcd v3, no node that must live, and nodes whose loss is noticed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from elastictrain.clock import SystemClock
from elastictrain.errors import ConfigError
from elastictrain.notation import Given, read_seconds

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

BACKEND: Final = "etcd3"
STORE_TIMEOUT_S: Final = 60.0


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What the entry point `torchrun.handlers` names. Imports nothing: torch asks for it whatever backend is used."""
    return create_handler


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The handler of one node. Keys of `--rdzv-conf`: those of the etcd settings, join_timeout, last_call_timeout, ttl,
    outage_timeout.

    Blocks for the import of gRPC. Raises ConfigError for settings that cannot be; what is wrong with etcd itself shows
    in the first rendezvous.
    """
    from elastictrain.agent.address import find_local_address, make_node_id
    from elastictrain.agent.background_handler import BackgroundHandler
    from elastictrain.agent.store_host import StoreHost
    from elastictrain.rendezvous.driver import Driver
    from elastictrain.rendezvous.etcd.opening import open_etcd_store
    from elastictrain.rendezvous.etcd.settings import PASSWORD_VARIABLE, read_etcd_settings
    from elastictrain.rendezvous.handler import ElasticRendezvousHandler
    from elastictrain.rendezvous.records import Settings

    conf = {str(name): str(value) for name, value in params.config.items()}
    settings = Settings(
        run_id=params.run_id,
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        join_timeout_s=_seconds(conf, "join_timeout", "600"),
        last_call_timeout_s=_seconds(conf, "last_call_timeout", "30"),
        ttl_s=_seconds(conf, "ttl", "10"),
        outage_timeout_s=_seconds(conf, "outage_timeout", "60"),
    )
    if not params.run_id or params.run_id == "none":
        raise ConfigError("--rdzv-id: expected a name for the run, the same on every node, seen none; give --rdzv-id")
    etcd = read_etcd_settings(
        params.endpoint,
        conf,
        password=os.environ.get(PASSWORD_VARIABLE),
        join_timeout_s=settings.join_timeout_s,
        is_multi_node=params.max_nodes > 1,
    )
    clock = SystemClock()
    host = params.local_addr or find_local_address((each.host, each.port) for each in etcd.endpoints)
    store_host = StoreHost(host)
    store = open_etcd_store(etcd, clock)
    driver = Driver(
        store, settings, clock=clock, node_id=make_node_id(), host=store_host.host, store_port=store_host.port
    )

    def close() -> None:
        store.close()
        store_host.close()

    handler = ElasticRendezvousHandler(
        driver, clock=clock, backend=BACKEND, store_factory=connect_store, is_whole_node=True
    )
    return BackgroundHandler(handler, driver, close)


def connect_store(host: str, port: int) -> Store:
    """The process group's store, which the agent of another node, or this one, serves."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=STORE_TIMEOUT_S))


def _seconds(conf: Mapping[str, str], name: str, default: str) -> float:
    return read_seconds(Given(f"--rdzv-conf {name}", conf.get(name, default)), example=default)
