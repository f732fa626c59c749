"""From settings to a running agent: what `elastictrain run`, `elastictrain resume` and `elastictrain.launch` share."""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

from elastictrain.clock import SystemClock
from elastictrain.config import ENTRYPOINT_VARIABLE, Program, RunConfig
from elastictrain.errors import ConfigError, WorkerError
from elastictrain.log import configure_logging, get_logger
from elastictrain.resolve import read_log_level, resolve_run
from elastictrain.run_directory import RunClaim, claim_run_dir

logger = get_logger(__name__)


def entrypoint_of(program: Program) -> tuple[str, tuple[str, ...]]:
    """Kind ("script", "module" or "command") and argument vector of a program."""
    argv = (program.script, *program.args)
    if program.run_path:
        return "script", argv
    if program.no_python:
        return "command", argv
    return ("module" if program.module else "script"), argv


def run_command_line(
    config: RunConfig, claim: RunClaim, *, resume_at_step: int | None, committed_step: int | None
) -> int:
    """Run the agent of this node for a program from the command line, in this process, which must have no threads.

    `committed_step` is the newest step that the ledger of a resumed run tells of, None for a new run. Blocks until the
    run is over on this node and returns the exit code. `claim` is given back at the end.
    """
    # Before torch is imported: its thread pool reads the variable once.
    if config.omp_num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.omp_num_threads)
        logger.info("OMP_NUM_THREADS is %d for each worker; set it yourself to change that", config.omp_num_threads)
    import torch.distributed.elastic.agent.server.api  # noqa: F401  once, for this process and all that it forks

    from elastictrain.agent.forkserver import WorkerStart, start_fork_server
    from elastictrain.worker.bootstrap import Entrypoint, run_entrypoint

    kind, argv = entrypoint_of(config.program)
    entrypoint = Entrypoint(kind=kind, argv=argv)
    fresh = config.start_method == "spawn" and kind != "command"
    start = WorkerStart(
        run=functools.partial(run_entrypoint, entrypoint),
        argv=(config.program.interpreter, "-m", "elastictrain.worker.bootstrap") if fresh else (),
        env={ENTRYPOINT_VARIABLE: entrypoint.to_json()} if fresh else {},
        preloads=not fresh and kind != "command",
    )
    pid, sock = start_fork_server(start, in_child=claim.close)
    try:
        return _run_agent(
            config, sock, resume_at_step=resume_at_step, committed_step=committed_step, uses_agent_store=True
        )
    finally:
        sock.close()
        os.waitpid(pid, 0)
        claim.close()


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nproc_per_node: int | str = 1,
    **options: Any,
) -> None:
    """Run `fn(*args)` in `nproc_per_node` worker processes, with everything that `elastictrain run` gives a script.

    A function that takes one parameter more than `args` gets its local rank first, as torch.multiprocessing.spawn
    calls it. `fn` and `args` must be picklable: they reach the workers through a new interpreter. Further options are
    those of the command line, by their name in Python: run_dir, max_restarts, checkpoint_every, keep, ...

    Blocks until the run is over. Raises ConfigError for wrong options, before anything is started, and WorkerError
    when the run failed.
    """
    configure_logging(read_log_level(os.environ))
    if not callable(fn):
        raise ConfigError(f"launch(fn, ...) takes a function, saw {type(fn).__name__}", field="fn")
    _check_reachable(fn)
    from elastictrain.agent.contact import reach_store
    from elastictrain.agent.meeting import check_meeting
    from elastictrain.resolve import OPTIONS

    if unknown := sorted(options.keys() - OPTIONS.keys()):
        raise ConfigError(f"launch() has no option {unknown[0]!r}; it takes {', '.join(sorted(OPTIONS))}")
    texts = {name: value if isinstance(value, bool) else str(value) for name, value in options.items()}
    name = f"{fn.__module__}.{getattr(fn, '__qualname__', type(fn).__name__)}"
    namespace = argparse.Namespace(script=name, script_args=[], nproc_per_node=str(nproc_per_node), **texts)
    config = _without_spares(replace(resolve_run(namespace, os.environ), argv=("launch", name)), fn, args)
    _say_warnings(config)
    check_meeting(config, os.environ)
    reach_store(config, os.environ, forks=False)
    with claim_run_dir(config, resume=False):
        code, reason = _launch_claimed(config, fn, tuple(args))
    if code != 0:
        raise WorkerError(f"the run in {config.run_dir} ended with exit code {code}: {reason}")


def _check_reachable(fn: Callable[..., Any]) -> None:
    """Refuse a function that a new interpreter could not find."""
    main = sys.modules["__main__"]
    if fn.__module__ == "__main__" and not hasattr(main, "__file__") and getattr(main, "__spec__", None) is None:
        raise ConfigError(
            f"launch(fn): {getattr(fn, '__qualname__', fn)} was typed into an interpreter or a notebook, where the "
            "workers, which are new interpreters, cannot find it: write it into a file and import it from there",
            field="fn",
        )
    try:
        ForkingPickler.dumps(fn)
    except Exception as error:  # whatever the pickling code of a user's object raises
        raise ConfigError(
            f"launch(fn) takes a function of a module, which workers can import, saw one that is none: {error}",
            field="fn",
        ) from None


def _without_spares(config: RunConfig, fn: Callable[..., Any], args: Sequence[Any]) -> RunConfig:
    """A spare has no local rank yet, so it cannot begin a function that gets it as an argument."""
    from elastictrain.worker.bootstrap import takes_local_rank

    world = config.world
    if world.nproc_per_node == 1 or world.spares == 0 or not takes_local_rank(fn, args):
        return config
    warnings = config.warnings
    if world.spares is not None:
        warnings += ("spares: no effect here: the function gets its local rank as an argument, which a spare lacks",)
    return replace(config, world=replace(world, spares=0), warnings=warnings)


def _say_warnings(config: RunConfig) -> None:
    for line in config.warnings:
        logger.warning("%s", line)


def _launch_claimed(config: RunConfig, fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[int, str]:
    from elastictrain.agent.forkserver import WorkerStart, run_fork_server
    from elastictrain.worker.bootstrap import Entrypoint, run_entrypoint

    agent_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    entrypoint = Entrypoint(kind="function", argv=(config.program.script,), function=fn, function_args=args)
    start = WorkerStart(run=functools.partial(run_entrypoint, entrypoint))
    context = multiprocessing.get_context("spawn")
    added = {} if config.omp_num_threads is None else {"OMP_NUM_THREADS": str(config.omp_num_threads)}
    with _variables(added):
        server = context.Process(target=run_fork_server, args=(server_end, start), name="elastictrain-fork-server")
        server.start()
    server_end.close()
    try:
        code = _run_agent(config, agent_end, resume_at_step=None, committed_step=None, uses_agent_store=False)
    finally:
        agent_end.close()
        server.join()
        server.close()
    return code, "see the messages above"


@contextlib.contextmanager
def _variables(added: dict[str, str]) -> Any:
    """Set variables for the processes that are started in the block."""
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _run_agent(
    config: RunConfig,
    fork_server: socket.socket,
    *,
    resume_at_step: int | None,
    committed_step: int | None,
    uses_agent_store: bool,
) -> int:
    """Put the agent together, run it, tell how it ended. Returns the exit code."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from elastictrain.agent.meeting import open_meeting
    from elastictrain.agent.node_agent import NodeAgent
    from elastictrain.agent.recorder import Recorder
    from elastictrain.rendezvous.handler import ElasticRendezvousHandler

    clock = SystemClock()
    meeting = open_meeting(config, clock, os.environ)
    recorder = Recorder(run_id=config.run_id, run_dir=config.run_dir, node_id=meeting.node_id, clock=clock)
    try:
        if committed_step is not None:
            recorder.set_history(committed_step)
        recorder.run_started(config.to_spec())
        recorder.start_exporter(config.metrics.host, config.metrics.port, health=lambda: None)
        handler = ElasticRendezvousHandler(
            meeting.driver, clock=clock, backend=config.world.rdzv_backend, store_factory=_refuse_store
        )
        spec = WorkerSpec(
            role=config.role,
            local_world_size=config.world.nproc_per_node,
            rdzv_handler=handler,
            entrypoint=config.program.script,
            max_restarts=config.max_restarts or 0,
        )
        agent = NodeAgent(
            spec,
            config=config,
            meeting=meeting,
            fork_server=fork_server,
            recorder=recorder,
            clock=clock,
            uses_agent_store=uses_agent_store,
            resume_at_step=resume_at_step,
        )
        agent.run(config.role)
    finally:
        meeting.close()
        recorder.close()
    _say_end(agent, config)
    return agent.ending.exit_code


def _refuse_store(host: str, port: int) -> Any:
    raise NotImplementedError(f"the agent's own loop hands out {host}:{port}")


def _say_end(agent: Any, config: RunConfig) -> None:
    """The last words: how the run ended; on a failure its traceback, rank and step come last."""
    if agent.ending.exit_code == 0:
        logger.info("run %s finished at step %d", config.run_id, agent.recorder.committed_step)
        return
    logger.error("run %s ended with exit code %d: %s", config.run_id, agent.ending.exit_code, agent.ending.reason)
    failure = agent.ending.failure
    if failure is None:
        return
    rank = "?" if failure.rank is None else failure.rank
    step = "before its first step" if failure.step is None else f"at step {failure.step}"
    sys.stdout.flush()
    text = failure.traceback.rstrip() + "\n" if failure.traceback else ""
    sys.stderr.write(f"{text}[elastictrain] first failure: rank {rank}, {step}: {failure.describe()}\n")
    sys.stderr.flush()
