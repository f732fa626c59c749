"""What cannot run is refused before anything starts, and nothing of the user's is executed to find out."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from elastictrain.cli.options import build_parser
from elastictrain.cli.preflight import check_metrics_port, check_script
from elastictrain.config import RunConfig
from elastictrain.errors import ConfigError
from elastictrain.resolve import resolve_run

TRAP = "raise SystemExit('executed')\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAP)
    for package in ("pack", "pack/inner"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(TRAP)
    (tmp_path / "pack/inner/train.py").write_text(TRAP)
    (tmp_path / "pack/__main__.py").write_text(TRAP)
    (tmp_path / "space/deep").mkdir(parents=True)
    (tmp_path / "space/deep/train.py").write_text(TRAP)
    return tmp_path


def config(*words: str, environ: dict[str, str] | None = None) -> RunConfig:
    return resolve_run(build_parser().parse_args(["run", *words]), environ or {})


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_script(config(*words))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["train.py"],
        ["--run-path", "train.py"],
        ["pack"],
        ["-m", "pack"],
        ["-m", "pack.inner.train"],
        ["-m", "space.deep.train"],
        ["-m", "timeit"],
        ["-m", "json.tool"],
        ["--no-python", "sh"],
        ["--no-python", "/bin/sh"],
    ],
)
def test_program_passes_unexecuted_when_it_can_run(words: list[str], folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    loaded = set(sys.modules)
    check_script(config(*words))
    assert sorted(folder.rglob("*")) == before  # no bytecode either
    assert not {name for name in set(sys.modules) - loaded if name.split(".")[0] in {"pack", "space"}}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trian.py"], "did you mean train.py?"),
        (["pack/inner/trane.py"], "did you mean pack/inner/train.py?"),
        (["nowhere/at/all.py"], "seen nothing there"),
        (["train.py/x.py"], "seen nothing there"),
        (["space"], "seen a folder"),
        (["pack/inner"], "seen a folder"),
        (["/dev/null"], "no regular file"),
        (["-m", "train.py"], "drop -m"),
        (["-m", "trian"], "did you mean train?"),
        (["-m", "pack.inner.trian"], "did you mean pack.inner.train?"),
        (["-m", "pakc.inner.train"], "seen no module pakc; did you mean pack.inner.train?"),
        (["-m", "pack.inner"], "a package without __main__"),
        (["-m", "train.inner"], "to be a module, no package"),
        (["-m", "pack..train"], "no module pack."),
        (["-m", "."], "no module"),
        (["--no-python", "no-such-command-here"], "no such command on PATH"),
        (["--no-python", "./train.py"], "without execute permission"),
        (["--no-python", "train.py"], "did you mean ./train.py?"),
    ],
)
def test_program_is_refused_when_it_cannot_run(words: list[str], says: str) -> None:
    assert says in refusal(*words)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (b"x = 1\nfor x in\n", 2),
        (b"def f():\n    pass\n  x\n", 3),
        (b"\n\nreturn 3\n", 3),
        (b"# coding: latin-1\nx = '\xe9'\nclass\n", 3),
    ],
)
def test_syntax_error_names_its_line_when_found(source: bytes, line: int, folder: Path) -> None:
    for name, words in (("bad.py", ["bad.py"]), ("pack/inner/bad.py", ["-m", "pack.inner.bad"])):
        (folder / name).write_bytes(source)
        assert f"{folder / name}:{line}: " in refusal(*words)


@pytest.mark.parametrize("source", [b"x\0y", b"\xff\xfe", b"# coding: none-such\n", b"\x80\x04pickle"])
def test_script_is_refused_when_it_is_no_text(source: bytes, folder: Path) -> None:
    (folder / "bad.py").write_bytes(source)
    assert str(folder / "bad.py") in refusal("bad.py")


def test_warning_is_left_to_the_workers_when_source_has_one(folder: Path) -> None:
    (folder / "warns.py").write_text("x = '\\d'\nassert (x, 'always true')\n")
    check_script(config("warns.py"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_script_is_refused_when_it_cannot_be_read(folder: Path) -> None:
    (folder / "train.py").chmod(0)
    assert "cannot be read" in refusal("train.py")


def test_other_python_decides_when_it_runs_the_script(folder: Path) -> None:
    (folder / "future.py").write_text("match match:\n  else\n")
    check_script(config("future.py", environ={"PYTHON_EXEC": "/opt/python9"}))


def test_metrics_port_is_refused_when_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--metrics-port: .* seen {port}: Address already in use") as caught:
            check_metrics_port(config("--metrics-port", str(port), "train.py"))
        assert caught.value.seen == port
    check_metrics_port(config("--metrics-port", str(port), "train.py"))
    check_metrics_port(config("train.py"))


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_metrics_host_is_refused_when_not_ours(host: str) -> None:
    with pytest.raises(ConfigError, match="--metrics-host"):
        check_metrics_port(config("--metrics-host", host, "train.py"))
