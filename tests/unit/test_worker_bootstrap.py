"""How a worker calls the user's program."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from elastictrain.worker import bootstrap
from elastictrain.worker.bootstrap import Entrypoint


@pytest.fixture(autouse=True)
def local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")


def test_function_gets_its_arguments_when_they_fit() -> None:
    seen: list[Any] = []

    def takes_two(a: int, b: int = 5) -> None:
        seen.append((a, b))

    bootstrap._call_function(takes_two, (1,))
    assert seen == [(1, 5)]


def test_function_gets_its_local_rank_first_when_it_takes_one_more() -> None:
    seen: list[Any] = []

    def takes_rank(rank: int, world_size: int) -> None:
        seen.append((rank, world_size))

    bootstrap._call_function(takes_rank, (8,))
    bootstrap._call_function(lambda rank: seen.append(rank), ())
    bootstrap._call_function(print, ())
    assert seen == [(3, 8), 3]


@pytest.mark.parametrize(
    ("value", "code"), [(None, 0), (0, 0), (3, 3), (256 + 7, 7), (-1, 255), ("text", 1), (False, 0)]
)
def test_exit_code_is_the_interpreters_when_the_program_exits(value: Any, code: int) -> None:
    assert bootstrap._exit_code(SystemExit(value)) == code


def test_entrypoint_comes_back_equal_when_it_went_through_the_environment() -> None:
    entrypoint = Entrypoint(kind="script", argv=("a.py", "", "--x", "ü \n"))
    assert Entrypoint.from_json(entrypoint.to_json()) == entrypoint


def test_script_sees_its_own_arguments_and_folder_when_it_is_called(tmp_path: Any, monkeypatch: Any) -> None:
    script = tmp_path / "prog.py"
    (tmp_path / "beside_it.py").write_text("VALUE = 7\n")
    script.write_text("import sys, beside_it\nsys.modules['seen_by_test'] = (sys.argv, __name__, beside_it.VALUE)\n")
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    bootstrap._call(Entrypoint(kind="script", argv=(str(script), "-a", "")))
    assert sys.modules.pop("seen_by_test") == ([str(script), "-a", ""], "__main__", 7)
    sys.modules.pop("beside_it")
