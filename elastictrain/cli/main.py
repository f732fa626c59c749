"""The command `elastictrain`: parse, check, hand over. Exit codes:

0 finished · 1 the script failed and its budget is spent (or: verify found a break) · 2 wrong usage or configuration,
never retry · 75 stopped by preemption, `elastictrain resume` continues · 128 + signal where a signal ended it
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from elastictrain.cli.options import build_parser
from elastictrain.config import RunConfig
from elastictrain.errors import ElasticTrainError
from elastictrain.log import configure_logging, get_logger

logger = get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a user's mistake becomes one line on stderr."""
    try:
        namespace = build_parser().parse_args(sys.argv[1:] if argv is None else argv)
        return _dispatch(namespace)
    except ElasticTrainError as error:
        sys.stderr.write(f"elastictrain: error: {error}\n")
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader of our output is gone: nothing more to say
        return 0
    except KeyboardInterrupt:
        return 130


def _dispatch(namespace: argparse.Namespace) -> int:
    match namespace.command:
        case "run":
            return _run(namespace)
        case "resume":
            from elastictrain.cli.resume import resume_command

            return resume_command(namespace)
        case "status":
            from elastictrain.cli.status import status_command

            return status_command(Path(namespace.run_dir), as_json=getattr(namespace, "json", False))
        case "verify":
            from elastictrain.cli.verify import verify_command

            return verify_command(Path(namespace.run_dir))
        case _:
            from elastictrain.cli.checkpoints import checkpoints_command

            return checkpoints_command(namespace.action, Path(namespace.run_dir))


def _run(namespace: argparse.Namespace) -> int:
    from elastictrain.agent.contact import reach_store
    from elastictrain.launching import run_command_line
    from elastictrain.resolve import resolve_run
    from elastictrain.run_directory import claim_run_dir

    config = resolve_run(namespace, os.environ)
    prepare(config)
    reach_store(config, os.environ)
    claim = claim_run_dir(config, resume=False)
    logger.info("run %s in %s", config.run_id, config.run_dir)
    return run_command_line(config, claim, resume_at_step=None, committed_step=_known_step(config))


def _known_step(config: RunConfig) -> int | None:
    """The newest step in the ledgers of a folder that a node comes back to, None for a new run."""
    if not config.world.is_shared:
        return None
    from elastictrain.cli.status import read_status

    return read_status(config.run_dir).step


def prepare(config: RunConfig) -> None:
    """Everything that can be wrong before a process is started or a file written. Raises ConfigError."""
    from elastictrain.agent.meeting import check_meeting
    from elastictrain.cli.preflight import check_metrics_port, check_script
    from elastictrain.resolve import read_log_level

    configure_logging(read_log_level(os.environ))
    check_meeting(config, os.environ)
    check_script(config)
    check_metrics_port(config)
    for line in config.warnings:
        logger.warning("%s", line)


if __name__ == "__main__":
    raise SystemExit(main())
