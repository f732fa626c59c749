"""Reading ledgers: which break is named, and what a live or half-damaged ledger still yields."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_runs import RUN_ID, RecordedRun, finished_run, make_run_dir

from elastictrain.clock import ManualClock
from elastictrain.errors import ConfigError
from elastictrain.ledger import LedgerWriter, ledger_path
from elastictrain.ledger_reader import check_chain, newest_generation, newest_round, read_ledger, read_run_id

Lines = list[bytes]


def swap(lines: Lines) -> Lines:
    return [*lines[:3], lines[4], lines[3], *lines[5:]]


CASES: dict[str, tuple[Callable[[Lines], Lines], str, int]] = {
    "content": (lambda lines: [*lines[:3], lines[3].replace(b'"seq"', b'"Seq"'), *lines[4:]], "altered", 4),
    "value": (lambda lines: [*lines[:1], lines[1].replace(b'"stop":4', b'"stop":3'), *lines[2:]], "altered", 2),
    "space": (lambda lines: [*lines[:3], lines[3].replace(b":", b": ", 1), *lines[4:]], "altered", 4),
    "garbage": (lambda lines: [*lines[:3], b"\xff\x00{}\n", *lines[4:]], "altered", 4),
    "empty line": (lambda lines: [*lines[:3], b"\n", *lines[3:]], "altered", 4),
    "joined": (lambda lines: [*lines[:3], lines[3][:-1] + lines[4], *lines[5:]], "altered", 4),
    "first removed": (lambda lines: lines[1:], "removed", 1),
    "middle removed": (lambda lines: [*lines[:3], *lines[4:]], "removed", 4),
    "swapped": (swap, "reordered", 4),
    "copied": (lambda lines: [*lines[:4], lines[1], *lines[4:]], "inserted", 5),
    "last removed": (lambda lines: lines[:-1], "truncated", 22),
    "last torn": (lambda lines: [*lines[:-1], lines[-1][:-1]], "truncated", 22),
    "emptied": (lambda lines: [], "truncated", 1),
}


@pytest.mark.parametrize("name", CASES)
def test_chain_names_file_line_and_reason_when_a_ledger_was_changed(tmp_path: Path, name: str) -> None:
    change, kind, line = CASES[name]
    path = ledger_path(finished_run(tmp_path), "node0")
    lines = path.read_bytes().splitlines(keepends=True)
    assert check_chain(path, run_id=RUN_ID) is None
    path.write_bytes(b"".join(change(lines)))
    problem = check_chain(path, run_id=RUN_ID)
    assert problem is not None
    assert (problem.kind, problem.path.name, problem.line) == (kind, "node0.jsonl", line), str(problem)


def test_chain_is_broken_when_the_file_is_of_another_run_or_node(tmp_path: Path) -> None:
    path = ledger_path(finished_run(tmp_path), "node0")
    assert "another run or node" in str(check_chain(path, run_id="run-2"))
    renamed = path.with_name("node1.jsonl")
    shutil.copy(path, renamed)
    assert "another run or node" in str(check_chain(renamed, run_id=RUN_ID))


def test_chain_is_broken_when_the_end_was_written_anew_with_right_hashes(tmp_path: Path) -> None:
    """Somebody cut the end off and appended other events through the product itself; the head remembers."""
    path = ledger_path(finished_run(tmp_path), "node0")
    head = path.with_suffix(".head")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    kept = head.read_bytes()
    head.unlink()
    writer = LedgerWriter(path, RUN_ID, "node0", ManualClock())
    writer.append("run_stopped", step=1, exit_code=0, reason="forged")
    writer.close()
    assert check_chain(path, run_id=RUN_ID) is None
    head.write_bytes(kept)
    assert "it was replaced" in str(check_chain(path, run_id=RUN_ID))


def test_reader_reports_a_missing_file_when_only_its_head_is_left(tmp_path: Path) -> None:
    ledger_path(finished_run(tmp_path), "node0").unlink()
    entries = read_ledger(tmp_path)
    assert entries == []
    assert [(problem.kind, problem.path.name) for problem in entries.problems] == [("removed", "node0.jsonl")]


def test_reader_yields_what_is_behind_a_break_when_lines_are_still_readable(tmp_path: Path) -> None:
    path = ledger_path(finished_run(tmp_path), "node0")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"garbage\n", *lines[4:]]))
    entries = read_ledger(tmp_path)
    assert len(entries) == len(lines) - 1
    assert [problem.kind for problem in entries.problems] == ["altered"]


def test_reader_takes_a_torn_end_as_no_break_when_the_run_is_alive(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.train(1)
    path = ledger_path(tmp_path, "node0")
    with path.open("ab") as file:
        file.write(b'{"v":1,"seq":3,"wa')
    entries = read_ledger(tmp_path)
    assert [entry.event for entry in entries] == ["node_started", "commit"]
    assert [problem.kind for problem in entries.problems] == ["torn"]
    assert check_chain(path, run_id=RUN_ID) is None
    run.writer.close()


def test_reader_refuses_a_line_of_another_version_when_it_meets_one(tmp_path: Path) -> None:
    path = ledger_path(finished_run(tmp_path), "node0")
    path.write_text(json.dumps({"v": 2, "seq": 1, "wall": 1, "mono": 1, "event": "x", "prev": "", "hash": ""}) + "\n")
    assert check_chain(path) is not None


def test_reader_merges_nodes_by_time_when_there_are_several(tmp_path: Path) -> None:
    make_run_dir(tmp_path)
    clock = ManualClock()
    writers = [LedgerWriter(ledger_path(tmp_path, node), RUN_ID, node, clock) for node in ("a", "b")]
    for step in range(6):
        clock.advance(1.0)
        writers[step % 2].append("evaluated", step=step, result=None)
    for writer in writers:
        writer.close()
    entries = read_ledger(tmp_path)
    assert [(entry.node, entry.fields["step"]) for entry in entries] == [("ab"[n % 2], n) for n in range(6)]
    assert entries.problems == []


def test_newest_generation_is_found_at_the_ends_of_all_files(tmp_path: Path) -> None:
    make_run_dir(tmp_path)
    assert newest_generation(tmp_path) == 0
    clock = ManualClock()
    for node, newest in (("a", 900), ("b", 7)):
        writer = LedgerWriter(ledger_path(tmp_path, node), RUN_ID, node, clock)
        for generation in range(1, newest + 1):
            writer.append("round", generation=generation, world_size=1, seats=["x" * 2000], reason="join")
        writer.append("run_finished", exit_code=0, step=1)
        writer.close()
    with ledger_path(tmp_path, "a").open("ab") as file:
        file.write(b'{"v":1,"generation":5000')  # torn by a crash
    assert newest_generation(tmp_path) == 900


def test_newest_round_is_found_before_whatever_came_after_it(tmp_path: Path) -> None:
    make_run_dir(tmp_path)
    assert newest_round(tmp_path) is None
    clock = ManualClock()
    for node, newest in (("a", 3), ("b", 5), ("c", 0)):
        writer = LedgerWriter(ledger_path(tmp_path, node), RUN_ID, node, clock)
        for generation in range(1, newest + 1):
            store = ["10.0.0.1", 4000 + generation]
            writer.append("round", generation=generation, world_size=1, seats=[], reason="join", store=store)
        for step in range(3000):
            writer.append("evaluated", step=step, result='not an "event":"round" of this run')
        writer.close()
    with ledger_path(tmp_path, "b").open("ab") as file:
        file.write(b'{"v":1,"event":"round","generation":5000')  # torn by a crash
    found = newest_round(tmp_path)
    assert found is not None
    assert (found["generation"], found["store"]) == (5, ["10.0.0.1", 4005])


def test_run_id_is_found_at_the_top_or_one_level_down_when_run_json_holds_it(tmp_path: Path) -> None:
    assert read_run_id(tmp_path) is None
    (tmp_path / "run.json").write_text('{"options": {"run_id": "deep"}}')
    assert read_run_id(tmp_path) == "deep"
    (tmp_path / "run.json").write_text('{"run_id": "top", "options": {"run_id": "deep"}}')
    assert read_run_id(tmp_path) == "top"
    for content in ("[]", "{", '"x"'):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(ConfigError, match=r"run\.json"):
            read_run_id(tmp_path)
