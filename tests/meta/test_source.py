"""The habits of this code base, held by tests: size, names, handlers, waiting, layers, types, style."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "elastictrain"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BIN = Path(sys.executable).parent
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "base"}
# Scripts may import these names and no others; they do not change.
PUBLIC_NAMES = {"init", "launch"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_package_is_found_when_tests_run() -> None:
    assert len(SOURCES) > 10


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_file_is_short_when_counted(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_function_is_short_when_counted(path: Path) -> None:
    long = {
        node.name: length
        for node in functions(path)
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not long


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_module_name_is_its_own_when_imported(path: Path) -> None:
    words = set(path.relative_to(PACKAGE).with_suffix("").parts) - {"__init__", "__main__"}
    assert not words & sys.stdlib_module_names
    assert not words & VAGUE_NAMES


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_broad_handler_has_a_reason_when_it_exists(path: Path) -> None:
    """A comment on the line of the handler, or on the line before or after it, says why everything is caught."""
    lines = path.read_text().splitlines()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.ExceptHandler) and is_broad(node) and not reraises(node):
            near = lines[node.lineno - 2 : node.lineno + 1]
            assert any("#" in line for line in near), f"{name_of(path)}:{node.lineno}"


def is_broad(handler: ast.ExceptHandler) -> bool:
    caught = handler.type
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(
        name is None or (isinstance(name, ast.Name) and name.id in {"Exception", "BaseException"}) for name in names
    )


def reraises(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.body[-1], ast.Raise) and handler.body[-1].exc is None


@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=name_of)
def test_nothing_sleeps_when_it_could_wait(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr == "sleep":
            assert not (isinstance(node.value, ast.Name) and node.value.id == "time"), f"{name_of(path)}:{node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            assert "sleep" not in {alias.name for alias in node.names}, f"{name_of(path)}:{node.lineno}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_is_unpickled_when_read(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = {alias.name for alias in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
        assert not names & {"pickle", "cloudpickle", "marshal", "shelve"}, f"{name_of(path)}:{node.lineno}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            assert "weights_only=True" in ast.unparse(node), f"{name_of(path)}:{node.lineno}"


@pytest.mark.parametrize("path", [path for path in TESTS if path.name.startswith("test_")], ids=name_of)
def test_tests_patch_nothing_of_ours_when_they_run(path: Path) -> None:
    imported = {
        alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not imported & {"mock", "MagicMock", "Mock", "patch"}


def test_environment_is_read_in_one_place_when_settings_are() -> None:
    """Modules may hand the environment on to a child or to resolve; only resolve looks up our variables in it."""
    pattern = re.compile(r"environ(?:\.get\(|\[)\s*[\"'](?:PET_|ELASTICTRAIN_)")
    assert [name_of(path) for path in SOURCES if pattern.search(path.read_text())] == []


def test_public_names_are_pinned_when_imported() -> None:
    if not (PACKAGE / "__init__.py").exists():
        pytest.skip("elastictrain/__init__.py is not written yet")
    code = (
        "import sys, elastictrain; print(sorted(set(elastictrain.__all__)));"
        "assert all(hasattr(elastictrain, name) for name in elastictrain.__all__)"
    )
    outcome = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 0, outcome.stderr
    assert set(ast.literal_eval(outcome.stdout)) >= PUBLIC_NAMES


def missing_layers() -> list[str]:
    """Name what the contract speaks of and nobody has written yet."""
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [
        f"elastictrain.{word.strip()}"
        for contract in lint["contracts"]
        for layer in contract.get("layers", ())
        if not layer.startswith("(")
        for word in re.split("[|:]", layer)
    ]
    named = [*layers, *(name for contract in lint["contracts"] for name in contract.get("source_modules", ()))]
    paths = {name: ROOT / name.replace(".", "/") for name in named}
    return [name for name, path in paths.items() if not (path.is_dir() or path.with_suffix(".py").exists())]


def test_layers_hold_when_linted(tmp_path: Path) -> None:
    if missing := missing_layers():
        pytest.skip(f"the contract names modules that are not written yet: {', '.join(missing)}")
    check([str(BIN / "lint-imports"), "--cache-dir", str(tmp_path)])


def test_style_holds_when_linted() -> None:
    check([str(BIN / "ruff"), "check", "--no-cache", "elastictrain", "tests"])
    check([str(BIN / "ruff"), "format", "--no-cache", "--check", "elastictrain", "tests"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_types_hold_when_checked() -> None:
    check([str(BIN / "mypy"), *([] if (PACKAGE / "__init__.py").exists() else ["--explicit-package-bases"])])


def check(command: list[str]) -> None:
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
