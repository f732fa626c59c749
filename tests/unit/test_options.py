"""The command line as typed: names, pass-through, and errors of one line."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.cli.options import build_parser
from elastictrain.errors import ConfigError
from elastictrain.resolve import OPTIONS

PARSER = build_parser()
COMMANDS = ("run", "resume", "status", "verify", "checkpoints")


def parse(*argv: str) -> dict[str, object]:
    return vars(PARSER.parse_args(list(argv)))


def error_of(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*argv)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    return str(caught.value)


def spellings(command: str) -> set[str]:
    return set(PARSER.commands[command]._option_string_actions)


def test_run_knows_every_spelling_when_torchrun_does() -> None:
    from torch.distributed.run import get_args_parser

    theirs = {option for action in get_args_parser()._actions for option in action.option_strings}
    assert theirs <= spellings("run")


def test_run_flags_take_a_value_when_torchruns_do() -> None:
    from torch.distributed.run import get_args_parser

    ours = PARSER.commands["run"]._option_string_actions
    for action in get_args_parser()._actions:
        for option in action.option_strings:
            assert (ours[option].nargs == 0) == (action.nargs == 0), option
            assert option in {"-h", "--help"} or ours[option].dest == action.dest


def test_options_and_settings_are_the_same_when_compared() -> None:
    dests = {action.dest for action in PARSER.commands["run"]._actions} - {"help"}
    assert dests == OPTIONS.keys()
    changed_by_resume = {action.dest for action in PARSER.commands["resume"]._actions}
    assert changed_by_resume - {"help", "run_dir", "at_step", "dry_run"} == {
        name for name, option in OPTIONS.items() if option.resumable
    }


@given(
    st.lists(st.text(max_size=8) | st.sampled_from(["--", "--help", "-h", "--nproc-per-node", "--keep=3", "-m", ""]))
)
def test_script_arguments_are_untouched_when_passed(args: list[str]) -> None:
    parsed = parse("run", "--nproc-per-node", "2", "train.py", *args)
    assert (parsed["script"], parsed["script_args"], parsed["nproc_per_node"]) == ("train.py", args, "2")


@pytest.mark.parametrize(
    ("words", "script"),
    [
        (["train.py"], "train.py"),
        (["--", "--odd.py"], "--odd.py"),
        (["--max-restarts", "-1", "train.py"], "train.py"),
        (["--standalone", "--nproc_per_node=2", "train.py"], "train.py"),
        (["-mr", "3", "module"], "module"),
        (["-mr3", "module"], "module"),
        (["-r=3", "train.py"], "train.py"),
        (["--log-dir", "", "train.py"], "train.py"),
        (["--role", "train.py", "other.py"], "other.py"),
    ],
)
def test_script_is_found_when_options_precede_it(words: list[str], script: str) -> None:
    parsed = parse("run", *words, "--tail", "x")
    assert parsed["script"] == script
    assert parsed["script_args"] == ["--tail", "x"]
    assert parsed["argv"] == ["run", *words, "--tail", "x"]


def test_namespace_holds_nothing_more_when_little_is_given() -> None:
    assert parse("run", "t.py").keys() == {"command", "argv", "script", "script_args"}
    assert parse("resume", "d", "--at-step", "12", "--keep", "4") == {
        "command": "resume",
        "argv": ["resume", "d", "--at-step", "12", "--keep", "4"],
        "run_dir": "d",
        "at_step": 12,
        "keep": "4",
    }
    assert parse("status", "d", "--json")["json"] is True
    assert parse("checkpoints", "verify", "d")["action"] == "verify"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "expected a command"),
        (["rnu"], "did you mean run?"),
        (["train.py"], "did you mean `elastictrain run train.py`?"),
        (["run"], "expected a script"),
        (["run", "--nproc-per-node", "2"], "expected a script"),
        (["run", "--nproc", "2", "t.py"], "did you mean --nproc-per-node?"),
        (["run", "--nproc_per_nod=2", "t.py"], "did you mean --nproc-per-node?"),
        (["run", "--zzz", "t.py"], "seen '--zzz'"),
        (["run", "-x", "t.py"], "seen '-x'"),
        (["run", "--role"], "--role: expected one argument"),
        (["run", "--standalone=1", "t.py"], "--standalone"),
        (["resume"], "RUN_DIR"),
        (["resume", "d", "e"], "seen 'e'"),
        (["resume", "d", "--run-dir", "e"], "a run keeps it as it was started"),
        (["resume", "d", "--at-step", "-4"], "--at-step"),
        (["status", "d", "--jsn"], "did you mean --json?"),
        (["checkpoints", "prune", "d"], "invalid choice: 'prune'"),
        (["--bogus", "run", "t.py"], "seen '--bogus'"),
    ],
)
def test_usage_error_is_one_line_when_wrong(argv: list[str], says: str) -> None:
    assert says in error_of(*argv)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_options_and_examples_when_asked(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(command, "--help")
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    assert f"usage: elastictrain {command}" in shown
    assert "example" in shown
    assert "_per_node" not in shown.replace("PET_NPROC", "")
    for option in spellings(command):
        assert "_" in option or option in shown


def test_version_is_shown_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--version")
    assert "(torch " in capsys.readouterr().out


def test_command_line_starts_without_torch_when_imported() -> None:
    code = (
        "import time; start = time.perf_counter()\n"
        "import elastictrain.cli.options as options; options.build_parser()\n"
        "import sys; print(time.perf_counter() - start, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    seconds = []
    for _ in range(3):
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        assert shown[1:] == ["False", "False"]
        seconds.append(float(shown[0]))
    assert min(seconds) < 0.06
