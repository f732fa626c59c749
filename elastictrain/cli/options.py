"""The command line: commands, options, their help, and errors of one line.

Values stay text here; `elastictrain.resolve` converts and checks them. A namespace holds only what was given. The
script's own arguments never pass through argparse, whose treatment of `--` and of options differs between versions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from elastictrain.errors import ConfigError
from elastictrain.notation import Given, closest, read_count


@dataclass(frozen=True, slots=True)
class _Option:
    """`metavar` None: a flag. `resume`: also an option of `elastictrain resume`."""

    name: str
    metavar: str | None
    text: str
    short: str | None = None
    resume: bool = True


_GROUPS: tuple[tuple[str, tuple[_Option, ...]], ...] = (
    (
        "workers",
        (
            _Option("nnodes", "N|MIN:MAX", "number of nodes (default 1); more than 1 needs --rdzv-backend"),
            _Option("nproc-per-node", "N|auto|cpu|gpu|xpu", "workers on this node (default 1)"),
            _Option(
                "hang-timeout",
                "auto|SECONDS",
                "kill a worker that commits nothing for so long (0: never; default: learned)",
            ),
            _Option("min-world-size", "N", "wait for replacements below this many workers (default 1)"),
            _Option(
                "spares",
                "auto|N",
                "processes that wait in init() to replace a lost worker (default: 1 if memory allows)",
            ),
            _Option("max-restarts", "N", "end after N failures (default: after 3 in a row without a committed step)"),
            _Option("role", "NAME", "the workers' role, part of their environment (default: default)"),
            _Option("virtual-local-rank", None, "every worker sees LOCAL_RANK 0 and only its own GPU"),
        ),
    ),
    (
        "run directory and checkpoints",
        (
            _Option("run-dir", "DIR", "where the run keeps everything (default runs/<run id>)", resume=False),
            _Option("checkpoint-every", "auto|30s|5m|500steps", "when to checkpoint (default auto)"),
            _Option("keep", "N", "how many of the newest checkpoints stay (default 3)"),
        ),
    ),
    (
        "metrics",
        (
            _Option("metrics-host", "ADDRESS", "where /metrics listens (default 127.0.0.1)"),
            _Option("metrics-port", "PORT", "its port (default: a free one, shown at the start)"),
        ),
    ),
    (
        "program",
        (
            _Option("module", None, "the script is a module, run like python -m", short="m", resume=False),
            _Option("no-python", None, "execute the script itself, not python", resume=False),
            _Option("run-path", None, "run the script inside the worker's interpreter (runpy)", resume=False),
        ),
    ),
    (
        "output of the workers (streams: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank: 0:3,1:2)",
        (
            _Option("log-dir", "DIR", "folder of log files (default: logs in the run directory)"),
            _Option("redirects", "STREAMS", "streams that go to files instead of the console", short="r"),
            _Option("tee", "STREAMS", "streams that go to files and the console", short="t"),
            _Option("local-ranks-filter", "RANKS", "show only these local ranks on the console, e.g. 0,1"),
            _Option("duplicate-stdout-filters", "WORDS", "copy lines of stdout with one of these to a common file"),
            _Option("duplicate-stderr-filters", "WORDS", "copy lines of stderr with one of these to a common file"),
        ),
    ),
    (
        "stopping",
        (
            _Option("grace-period-s", "SECONDS", "what a preemption notice leaves for a clean end (default 30)"),
            _Option("shutdown-timeout", "SECONDS", "time for workers to end after a signal (default 30)"),
            _Option("signals-to-handle", "NAMES", "signals passed on to workers (SIGTERM,SIGINT,SIGHUP,SIGQUIT)"),
        ),
    ),
    (
        "rendezvous",
        (
            _Option("standalone", None, "one node, nothing beside it (as by default)", resume=False),
            _Option(
                "rdzv-backend",
                "NAME",
                "where nodes meet: c10d (one node serves the others), etcd3, or embedded (default: one node)",
                resume=False,
            ),
            _Option(
                "rdzv-id",
                "ID",
                "the run id (default, on one node: date, time, four characters)",
                resume=False,
            ),
            _Option(
                "rdzv-conf",
                "KEY=VALUE,...",
                "join_timeout=600 (seconds); for several nodes: see the how-to",
            ),
            _Option(
                "rdzv-endpoint",
                "HOST:PORT",
                "of c10d: the node that serves (port 29400); of etcd3: etcd, several with commas",
                resume=False,
            ),
            _Option("local-addr", "ADDRESS", "address of this node for the others (default: found)"),
        ),
    ),
    (
        "accepted for torchrun's sake, without effect here (a warning says why)",
        (
            _Option("node-rank", "N", "rank of this node", resume=False),
            _Option("master-addr", "ADDRESS", "address of the first node", resume=False),
            _Option("master-port", "PORT", "port on the first node", resume=False),
            _Option("monitor-interval", "SECONDS", "how often to look at workers", resume=False),
            _Option("start-method", "spawn|fork|forkserver", "how workers are started", resume=False),
            _Option("event-log-handler", "NAME", "where events are logged", resume=False),
            _Option("logs-specs", "NAME", "entry point that places log files", resume=False),
            _Option("numa-binding", "MODE", "bind workers to CPUs near their GPU", resume=False),
        ),
    ),
)

_KEPT_BY_RESUME = frozenset(f"--{option.name}" for _, options in _GROUPS for option in options if not option.resume)

_EXAMPLES = {
    "run": """examples:
  elastictrain run --nproc-per-node 2 train.py --epochs 10
  elastictrain run --nproc-per-node auto --run-dir runs/first --checkpoint-every 5m train.py
  elastictrain run -m my_package.train --lr 0.1
  elastictrain run --nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint node-0:29400 --rdzv-id my-run train.py

Everything after the script is the script's own. Options of torchrun are also read from PET_* variables
(PET_NPROC_PER_NODE=2); an option on the command line goes first.""",
    "resume": """examples:
  elastictrain resume runs/first
  elastictrain resume runs/first --dry-run
  elastictrain resume runs/first --at-step 1200 --nproc-per-node 4

Options that are not given keep the value that run.json holds.""",
    "status": "example:\n  elastictrain status runs/first --json",
    "verify": "example:\n  elastictrain verify runs/first\n\nExit code 1 names the first break.",
    "checkpoints": """examples:
  elastictrain checkpoints list runs/first
  elastictrain checkpoints verify runs/first""",
}
_SUMMARIES = {
    "run": "start a run: a script on several workers, which goes on when one is lost",
    "resume": "continue a run that was stopped or killed, also with another number of workers",
    "status": "show who trains, the step, the rate and the last failures",
    "verify": "prove from the files alone that every sample was committed exactly once",
    "checkpoints": "list checkpoints, or read every byte of them and check it",
}


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the spelling with dashes only; the one with underscores means the same."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [name for name in action.option_strings if "_" not in name]
        if not names:
            return super()._format_action_invocation(action)
        metavar = "" if action.nargs == 0 else f" {action.metavar}"
        return f"{', '.join(names)}{metavar}"


class _CommandParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are ConfigErrors of one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Like the original, but an unknown option is an error that names the closest known one."""
        namespace, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            if word.startswith("-"):
                raise _unknown_option(word, self._option_string_actions, self.prog)
            self.error(f"expected nothing more, seen {word!r}")
        return namespace, []


class _RootParser(_CommandParser):
    """Finds the command, and cuts off the script and its arguments, before argparse reads the rest."""

    commands: Mapping[str, argparse.ArgumentParser]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        argv: list[str] = list(sys.argv[1:] if args is None else args)
        place = next((index for index, word in enumerate(argv) if not word.startswith("-")), None)
        if not argv:
            self.error(f"expected a command ({', '.join(self.commands)}), seen none")
        if place is not None and argv[place] not in self.commands:
            raise self._unknown_command(argv[place])
        if place is None or argv[place] != "run":
            namespace, unknown = super().parse_known_args(argv, namespace)
            namespace.argv = argv
            return namespace, unknown
        run = self.commands["run"]
        start = _script_place(argv, place + 1, run._option_string_actions, run.prog)
        namespace, unknown = super().parse_known_args(
            [word for word in argv[:start] if word != "--"], namespace
        )  # `--help` ends the program here, so it needs no script
        if start >= len(argv):
            run.error("expected a script to run, seen none; give e.g. `elastictrain run train.py`")
        namespace.argv, namespace.script, namespace.script_args = argv, argv[start], argv[start + 1 :]
        return namespace, unknown

    def _unknown_command(self, word: str) -> ConfigError:
        meant = closest(word, self.commands)
        if word.endswith(".py"):
            hint = f"did you mean `elastictrain run {word}`?"
        else:
            hint = f"did you mean {meant}?" if meant else "see `elastictrain --help`"
        return ConfigError(
            f"expected a command ({', '.join(self.commands)}), seen {word!r}; {hint}", field="command", seen=word
        )


class _Version(argparse.Action):
    """Prints the versions; they are looked up only then, since that is slow."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import platform

        from elastictrain.config import installed_version

        ours, torch = installed_version("elastictrain"), installed_version("torch")
        print(f"elastictrain {ours} (torch {torch}, Python {platform.python_version()})")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line; `parse_args(argv)` gives a namespace of what was given.

    Its attributes: `command`, `argv`, and per command: run: `script`, `script_args`, options; resume: `run_dir`,
    `at_step`, `dry_run`, options; status: `run_dir`, `json`; verify: `run_dir`; checkpoints: `action`, `run_dir`.
    `parse_args` raises ConfigError for wrong usage, and exits only after --help and --version.
    """
    root = _RootParser(
        prog="elastictrain",
        description="Fault-tolerant elastic training for PyTorch DDP.",
        epilog="`elastictrain COMMAND --help` shows the options of a command.",
        argument_default=argparse.SUPPRESS,
    )
    root.add_argument("--version", action=_Version, help="show the versions of elastictrain, torch and Python")
    commands = root.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands", parser_class=_CommandParser
    )
    root.commands = {
        name: commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=_EXAMPLES[name],
            argument_default=argparse.SUPPRESS,
        )
        for name, summary in _SUMMARIES.items()
    }
    root.commands["run"].usage = "elastictrain run [options] SCRIPT [arguments of the script]"
    _add_options(root.commands["run"])
    _complete_resume(root.commands["resume"])
    root.commands["status"].add_argument("--json", action="store_true", help="print one JSON object instead")
    root.commands["checkpoints"].add_argument("action", choices=("list", "verify"), help="what to do")
    for name in ("status", "verify", "checkpoints"):
        root.commands[name].add_argument("run_dir", metavar="RUN_DIR", help="the run directory")
    return root


def _complete_resume(parser: argparse.ArgumentParser) -> None:
    parser.usage = "elastictrain resume RUN_DIR [options]"
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run directory")
    parser.add_argument(
        "--at-step", "--at_step", metavar="N", type=_read_step, help="continue from the checkpoint of this step"
    )
    parser.add_argument(
        "--dry-run", "--dry_run", action="store_true", help="only say from where the run would continue"
    )
    _add_options(parser, for_resume=True)


def _read_step(text: str) -> int:
    return read_count(Given("--at-step", text), minimum=0, example=1200)


def _add_options(parser: argparse.ArgumentParser, *, for_resume: bool = False) -> None:
    for title, options in _GROUPS:
        wanted = [option for option in options if option.resume or not for_resume]
        if not wanted:
            continue
        group = parser.add_argument_group(title)
        for option in wanted:
            dashed = f"--{option.name}"
            names = [f"-{option.short}"] if option.short else []
            names.extend(dict.fromkeys((dashed, f"--{option.name.replace('-', '_')}")))
            dest = option.name.replace("-", "_")
            if option.metavar is None:
                group.add_argument(*names, dest=dest, action="store_true", help=option.text)
            else:
                group.add_argument(*names, dest=dest, metavar=option.metavar, help=option.text)


def _script_place(argv: Sequence[str], start: int, known: Mapping[str, argparse.Action], prog: str) -> int:
    """Find the index of the script: the first word that is neither an option nor an option's value.

    Gives len(argv) where there is none or where help is asked for before it. Raises ConfigError on an unknown option.
    """
    index = start
    while index < len(argv):
        word = argv[index]
        if word == "--":
            return index + 1
        if not word.startswith("-") or word == "-":
            return index
        name, has_value, _ = word.partition("=")
        if name in {"-h", "--help"}:
            return len(argv)
        if not word.startswith("--") and name not in known:
            name, has_value = _last_of_cluster(word, known)
        if name not in known:
            raise _unknown_option(word, known, prog)
        index += 1 if has_value or known[name].nargs == 0 else 2
    return len(argv)


def _last_of_cluster(word: str, known: Mapping[str, argparse.Action]) -> tuple[str, str]:
    """Read short options written as one word (`-mr3`): the last one, and the value that is glued to it."""
    for place, letter in enumerate(word[1:], start=2):
        action = known.get(f"-{letter}")
        if action is None or action.nargs != 0:
            return f"-{letter}", word[place:]
    return f"-{word[-1]}", ""


def _unknown_option(word: str, known: Iterable[str], prog: str) -> ConfigError:
    name = word.partition("=")[0]
    dashed = name.replace("_", "-")
    meant = closest(dashed, (option for option in known if "_" not in option))
    if dashed in _KEPT_BY_RESUME and prog.endswith(" resume"):
        hint = "a run keeps it as it was started: drop it"
    elif meant:
        hint = f"did you mean {meant}?"
    else:
        hint = "options of the script go behind the script" if prog.endswith(" run") else "drop it"
    return ConfigError(
        f"expected an option of `{prog}`, seen {name!r}; {hint}; see `{prog} --help`", field=name, seen=word
    )
