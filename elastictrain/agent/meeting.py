"""How the agent of this node meets those of the others: the store, its part in the rendezvous, and its address."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from elastictrain.agent.address import LOOPBACK, find_local_address, host_label, make_node_id
from elastictrain.clock import Clock
from elastictrain.config import RunConfig, installed_version
from elastictrain.errors import ConfigError
from elastictrain.ledger_reader import newest_generation
from elastictrain.log import get_logger
from elastictrain.rendezvous.driver import Driver
from elastictrain.rendezvous.embedded import EmbeddedStore
from elastictrain.rendezvous.etcd.opening import open_etcd_store
from elastictrain.rendezvous.etcd.settings import CONF_KEYS, PASSWORD_VARIABLE, EtcdSettings, read_etcd_settings
from elastictrain.rendezvous.records import Settings

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
        unknown = sorted(config.world.rdzv_conf.keys() - CONF_KEYS - _OWN_KEYS)
        if unknown:
            raise ConfigError(
                f"--rdzv-conf: expected keys of {', '.join(sorted(CONF_KEYS | _OWN_KEYS))}, seen {', '.join(unknown)}; "
                "drop them",
                field="--rdzv-conf",
                seen=unknown,
            )
        _etcd_settings(config, environ)


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
        agreed={"elastictrain": installed_version("elastictrain"), "script": config.program.script},
    )
    if not world.is_shared:
        host, node_id = StoreHost(LOOPBACK), host_label()
        driver = Driver(
            EmbeddedStore(clock=clock), settings, clock=clock, node_id=node_id, host=LOOPBACK, store_port=host.port
        )
        return Meeting(driver, host, node_id, lambda: None)
    etcd = _etcd_settings(config, environ)
    address = world.local_addr or find_local_address((each.host, each.port) for each in etcd.endpoints)
    host, node_id = StoreHost(address), make_node_id()
    store = open_etcd_store(etcd, clock)
    driver = Driver(store, settings, clock=clock, node_id=node_id, host=address, store_port=host.port)
    logger.info("node %s at %s meets the others at etcd %s", node_id, address, etcd.names)
    return Meeting(driver, host, node_id, store.close)


def _etcd_settings(config: RunConfig, environ: Mapping[str, str]) -> EtcdSettings:
    return read_etcd_settings(
        config.world.rdzv_endpoint,
        {name: value for name, value in config.world.rdzv_conf.items() if name not in _OWN_KEYS},
        password=environ.get(PASSWORD_VARIABLE),
        join_timeout_s=config.world.join_timeout_s,
        is_multi_node=config.world.max_nodes > 1,
    )
