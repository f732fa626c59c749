"""How the agent of this node meets those of the others: the store, its part in the rendezvous, and its address."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from elastictrain.agent.address import LOOPBACK, find_local_address, find_own_address, host_label, make_node_id
from elastictrain.clock import Clock
from elastictrain.config import RDZV_SECRET_VARIABLE, RunConfig, installed_version
from elastictrain.errors import ConfigError
from elastictrain.ledger_reader import newest_generation, newest_round
from elastictrain.log import get_logger
from elastictrain.meeting_options import SERVED_BACKEND, TORCHRUN_CONF_KEYS
from elastictrain.rendezvous.driver import Driver
from elastictrain.rendezvous.embedded import EmbeddedStore
from elastictrain.rendezvous.etcd import settings as etcd
from elastictrain.rendezvous.etcd.opening import open_etcd_store
from elastictrain.rendezvous.records import Settings
from elastictrain.rendezvous.served import settings as served
from elastictrain.rendezvous.served.hosting import read_secret

if TYPE_CHECKING:
    from elastictrain.agent.store_host import StoreHost

logger = get_logger(__name__)

_OWN_KEYS = frozenset({"join_timeout", "last_call_timeout", "ttl", "outage_timeout"})


class Meeting:
    """What `open_meeting` has opened. `close` it when the agent has ended: that tells the others."""

    def __init__(self, driver: Driver, store_host: StoreHost, node_id: str, close_store: Callable[[], None]) -> None:
        self.driver = driver
        self.store_host = store_host
        self.node_id = node_id
        self._close_store = close_store

    def close(self) -> None:
        """Leave the rendezvous and end the store; blocks up to 2 s for writes under way. Idempotent."""
        self.driver.close()
        self._close_store()
        self.store_host.close()


def check_meeting(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Raise ConfigError for settings of the store that cannot be. Connects to nothing."""
    if config.world.is_shared:
        is_served = config.world.rdzv_backend == SERVED_BACKEND
        known = _OWN_KEYS | (served.CONF_KEYS if is_served else etcd.CONF_KEYS)
        unknown = sorted(config.world.rdzv_conf.keys() - known - (TORCHRUN_CONF_KEYS if is_served else frozenset()))
        if unknown:
            raise ConfigError(
                f"--rdzv-conf: expected keys of {', '.join(sorted(known))}, seen {', '.join(unknown)}; drop them",
                field="--rdzv-conf",
                seen=unknown,
            )
        if is_served:
            read_secret(_served_settings(config, environ))
        else:
            etcd_settings(config, environ)


def open_meeting(config: RunConfig, clock: Clock, environ: Mapping[str, str]) -> Meeting:
    """Open the store and take up this node's part; does not wait for the network. Raises ConfigError."""
    from elastictrain.agent.store_host import StoreHost  # it imports torch, which the check above does without

    world = config.world
    settings = Settings(
        run_id=config.run_id,
        min_nodes=world.min_nodes,
        max_nodes=world.max_nodes,
        min_world_size=world.min_world_size,
        join_timeout_s=world.join_timeout_s,
        last_call_timeout_s=world.last_call_timeout_s,
        # A store in this process's memory cannot outlive the node, so its lease never ends.
        ttl_s=world.ttl_s if world.is_shared else float("inf"),
        outage_timeout_s=world.outage_timeout_s,
        past_generation=newest_generation(config.run_dir),
        agreed={
            "elastictrain": installed_version("elastictrain"),
            "script": config.program.script,
            # Two runs that were given one id by mistake would else train as one.
            "run_dir": str(config.run_dir),
        },
    )
    if world.is_shared:
        is_served = world.rdzv_backend == SERVED_BACKEND
        return (_meet_at_served if is_served else _meet_at_etcd)(config, settings, clock, environ)
    host, node_id = StoreHost(LOOPBACK), host_label()
    driver = Driver(
        EmbeddedStore(clock=clock), settings, clock=clock, node_id=node_id, host=LOOPBACK, store_port=host.port
    )
    return Meeting(driver, host, node_id, lambda: None)


def _meet_at_etcd(config: RunConfig, settings: Settings, clock: Clock, environ: Mapping[str, str]) -> Meeting:
    from elastictrain.agent.store_host import StoreHost

    where = replace(etcd_settings(config, environ), is_multi_node=False)  # what that is for was said at first contact
    address = config.world.local_addr or find_local_address((each.host, each.port) for each in where.endpoints)
    host, node_id = StoreHost(address), make_node_id()
    store = open_etcd_store(where, clock)
    driver = Driver(store, settings, clock=clock, node_id=node_id, host=address, store_port=host.port)
    logger.info("node %s at %s meets the others at etcd %s", node_id, address, where.names)
    return Meeting(driver, host, node_id, store.close)


def _meet_at_served(config: RunConfig, settings: Settings, clock: Clock, environ: Mapping[str, str]) -> Meeting:
    """Serve the store where this is the machine that the endpoint names, and be a client of it everywhere."""
    from elastictrain.agent.store_host import StoreHost
    from elastictrain.rendezvous.served.hosting import Hosting
    from elastictrain.rendezvous.served.served_store import ServedStore, make_session

    where = _served_settings(config, environ)
    secret, session = read_secret(where), make_session()
    address = config.world.local_addr or find_own_address(where.endpoint.host, where.endpoint.port)
    patience_s, last_host = _find_survivors(config, settings)
    hosting = Hosting(
        where,
        secret,
        clock,
        session=session,
        report=logger.warning,
        node_address=address,
        patience_s=patience_s,
        last_host=last_host,
    )
    is_serving = hosting.try_serve()
    host, node_id = StoreHost(address), make_node_id()
    store = ServedStore(where, clock, secret=secret, session=session, on_trouble=logger.warning, hosting=hosting)
    driver = Driver(store, settings, clock=clock, node_id=node_id, host=address, store_port=host.port)
    does = "serves the store to the others" if is_serving else "meets the others"
    logger.info("node %s at %s %s at %s", node_id, address, does, where.endpoint.address)

    def close() -> None:
        store.close()
        hosting.close()

    return Meeting(driver, host, node_id, close)


def _find_survivors(config: RunConfig, settings: Settings) -> tuple[float, tuple[str, int] | None]:
    """How long nodes of the run may still train that a new server does not know of, and where their rank 0 would be."""
    if settings.past_generation == 0:
        return 0.0, None
    newest = newest_round(config.run_dir) or {}
    store = newest.get("store")
    seats = newest.get("seats") or ()
    num_nodes = len({seat[2] for seat in seats if isinstance(seat, list) and len(seat) == 3})
    patience_s = settings.ttl_s + (0.0 if num_nodes == 1 else settings.outage_timeout_s)
    is_known = isinstance(store, list) and len(store) == 2 and isinstance(store[1], int)
    return patience_s, (str(store[0]), store[1]) if is_known and store is not None else None


def _own_settings(config: RunConfig) -> dict[str, str]:
    return {name: value for name, value in config.world.rdzv_conf.items() if name not in _OWN_KEYS}


def _served_settings(config: RunConfig, environ: Mapping[str, str]) -> served.ServedSettings:
    return served.read_served_settings(
        config.world.rdzv_endpoint,
        _own_settings(config),
        secret=environ.get(RDZV_SECRET_VARIABLE),
        join_timeout_s=config.world.join_timeout_s,
    )


def etcd_settings(config: RunConfig, environ: Mapping[str, str]) -> etcd.EtcdSettings:
    """How to reach the etcd of a run. Raises ConfigError."""
    return etcd.read_etcd_settings(
        config.world.rdzv_endpoint,
        _own_settings(config),
        password=environ.get(etcd.PASSWORD_VARIABLE),
        join_timeout_s=config.world.join_timeout_s,
        is_multi_node=config.world.max_nodes > 1,
    )
