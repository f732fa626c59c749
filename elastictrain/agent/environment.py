"""The environment of a worker: what torchrun gives it, and how it finds its agent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from elastictrain.agent.address import interface_of
from elastictrain.config import SECRET_VARIABLES, WORKER_ID_VARIABLE, RunConfig

# NCCL's watchdog must not end the process on an error: the worker recovers in place. 2: clean up only.
NCCL_ERROR_HANDLING: Final = "2"
PLACE_VARIABLES: Final = ("LOCAL_RANK", "RANK", "ROLE_RANK")


def worker_environment(
    config: RunConfig,
    base: Mapping[str, str],
    *,
    worker_id: str,
    local_rank: int,
    master_addr: str,
    master_port: int,
    restart_count: int,
    uses_agent_store: bool,
) -> dict[str, str]:
    """The variables of one worker, under torchrun's names. A variable that the user has set is never overwritten."""
    size = config.world.nproc_per_node
    env = dict(base)
    if not config.world.is_shared:
        env.update(
            RANK=str(local_rank),
            GROUP_RANK="0",
            ROLE_RANK=str(local_rank),
            WORLD_SIZE=str(size),
            GROUP_WORLD_SIZE="1",
            ROLE_WORLD_SIZE=str(size),
            MASTER_ADDR=master_addr,
            MASTER_PORT=str(master_port),
        )
    # With several nodes the world is known in `init` only. A script that does not call it must fail at the missing
    # variables, rather than train a world of its own on every node.
    env.update(
        LOCAL_RANK="0" if config.virtual_local_rank else str(local_rank),
        ROLE_NAME=config.role,
        LOCAL_WORLD_SIZE=str(size),
        TORCHELASTIC_RESTART_COUNT=str(restart_count),
        TORCHELASTIC_MAX_RESTARTS=str(config.max_restarts if config.max_restarts is not None else 3),
        TORCHELASTIC_RUN_ID=config.run_id,
        TORCHELASTIC_USE_AGENT_STORE=str(uses_agent_store),
    )
    env[WORKER_ID_VARIABLE] = worker_id
    for name in SECRET_VARIABLES:
        env.pop(name, None)
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", NCCL_ERROR_HANDLING)
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch would tell every lost connection with a C++ stack
    # gloo would look the host name up, and may listen where nobody should or nobody can connect.
    interface = interface_of(master_addr)
    if interface is not None:
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
    if config.omp_num_threads is not None:
        env.setdefault("OMP_NUM_THREADS", str(config.omp_num_threads))
    if config.virtual_local_rank:
        devices = env.get("CUDA_VISIBLE_DEVICES", "").split(",") if env.get("CUDA_VISIBLE_DEVICES") else []
        env["CUDA_VISIBLE_DEVICES"] = devices[local_rank] if local_rank < len(devices) else str(local_rank)
    return env


def place_variables(env: Mapping[str, str], *, num_places: int) -> list[str]:
    """Names in `env` whose values depend on the place that a worker has; of one place only the attempts vary."""
    names = ["TORCHELASTIC_RESTART_COUNT", *(PLACE_VARIABLES if num_places > 1 else ())]
    return [name for name in names if name in env]


def current_environment() -> dict[str, str]:
    """The agent's own environment, which workers inherit."""
    return dict(os.environ)
