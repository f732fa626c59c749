"""The ledger's writer: chain, torn lines, full disks, crashes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from elastictrain.clock import ManualClock, SystemClock
from elastictrain.errors import ConfigError, InternalError
from elastictrain.ledger import DURABLE_EVENTS, EVENT_FIELDS, MAX_TEXT, LedgerWriter, chain_root, ledger_path
from elastictrain.ledger_reader import check_chain, read_ledger

RUN = "run-1"


def open_writer(run_dir: Path, node: str = "node0") -> LedgerWriter:
    return LedgerWriter(ledger_path(run_dir, node), RUN, node, ManualClock(now=5.0))


def test_ledger_line_is_the_documented_format_when_written(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    writer.append("evaluated", step=3, result={"accuracy": 0.5})
    writer.close()
    line = ledger_path(tmp_path, "node0").read_bytes()
    assert line == (
        b'{"v":1,"seq":1,"wall":1700000000.0,"mono":5.0,"event":"evaluated","step":3,"result":{"accuracy":0.5},'
        b'"prev":"' + chain_root(RUN, "node0").encode() + b'","hash":"be33187f6e41a51434e5a0b3d1b54c35"}\n'
    )


def test_ledger_hashes_can_be_recomputed_by_anyone_when_lines_are_parsed(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    writer.append("node_started")
    writer.append("failure", rank=1, worker_id="w1", step=2, error_type="E", message="ä\n\ud800", traceback="t")
    writer.close()
    prev = hashlib.sha256(b"elastictrain ledger run-1\nnode0").hexdigest()[:32]
    for raw in ledger_path(tmp_path, "node0").read_text(encoding="ascii").splitlines():
        value = json.loads(raw)
        digest = value.pop("hash")
        canonical = json.dumps(value, separators=(",", ":")).encode()
        assert hashlib.sha256(canonical).hexdigest()[:32] == digest
        assert value["prev"] == prev
        prev = digest


@pytest.mark.parametrize("cut", [1, 2, 30, 100, 150])
def test_ledger_heals_a_torn_last_line_when_reopened(tmp_path: Path, cut: int) -> None:
    """The agent died in the middle of a write."""
    path = ledger_path(tmp_path, "node0")
    writer = open_writer(tmp_path)
    writer.append("user_values", step=1, values={"loss": 1.0})
    writer.append("user_values", step=2, values={"loss": 2.0, "filler": "x" * 200})
    os.close(writer._fd)
    whole = path.read_bytes()
    torn_line = whole.splitlines(keepends=True)[1][:-cut]
    path.write_bytes(whole[:-cut])

    again = open_writer(tmp_path)
    again.append("user_values", step=3, values={})
    again.close()

    entries = read_ledger(tmp_path)
    assert entries.problems == []
    assert [(entry.seq, entry.event) for entry in entries] == [(1, "user_values"), (2, "torn"), (3, "user_values")]
    assert entries[1].fields == {"size_bytes": len(torn_line), "kept_in": "node0.torn-2", "missing": 0}
    assert (path.parent / "node0.torn-2").read_bytes() == torn_line


def test_ledger_starts_anew_with_the_damage_set_aside_when_nothing_in_the_file_is_whole(tmp_path: Path) -> None:
    path = ledger_path(tmp_path, "node0")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\0" * 5000 + b"\n" + b"garbage\n\n" * 20_000)
    writer = open_writer(tmp_path)
    writer.append("node_started")
    writer.close()
    assert check_chain(path, run_id=RUN) is None
    assert [entry.event for entry in read_ledger(tmp_path)] == ["torn", "node_started"]


def test_ledger_continues_its_chain_when_reopened_many_times(tmp_path: Path) -> None:
    for _ in range(5):
        writer = open_writer(tmp_path)
        writer.append("run_started", config={"script": "x" * 100_000})
        writer.append("node_started")
        writer.close()
        writer.close()
    assert check_chain(ledger_path(tmp_path, "node0"), run_id=RUN) is None
    assert [entry.seq for entry in read_ledger(tmp_path)] == list(range(1, 11))
    assert sorted(os.listdir(tmp_path / "ledger")) == ["node0.head", "node0.jsonl"]


def test_ledger_says_how_many_synced_events_are_gone_when_reopened_after_a_cut(tmp_path: Path) -> None:
    path = ledger_path(tmp_path, "node0")
    writer = open_writer(tmp_path)
    for step in range(4):
        writer.append("user_values", step=step, values={})
    writer.close()
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    writer = open_writer(tmp_path)
    writer.close()
    assert read_ledger(tmp_path)[-1].fields == {"size_bytes": 0, "kept_in": None, "missing": 2}


def test_ledger_refuses_unknown_events_and_fields_when_a_caller_is_wrong(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    with pytest.raises(InternalError, match="'comit' is not one of"):
        writer.append("comit", step=1)
    with pytest.raises(InternalError, match=r"unknown \['stop'\], missing \['result'\]"):
        writer.append("evaluated", step=1, stop=2)
    with pytest.raises(InternalError, match="JSON cannot hold"):
        writer.append("evaluated", step=1, result=object())
    writer.append("evaluated", step=1, result=None)
    writer.close()
    assert [entry.seq for entry in read_ledger(tmp_path)] == [1]


def test_ledger_table_holds_only_known_durable_events() -> None:
    assert EVENT_FIELDS.keys() >= DURABLE_EVENTS
    reserved = {"v", "seq", "wall", "mono", "event", "prev", "hash"}
    assert not any(reserved & {*spec.fields, *spec.optional} for spec in EVENT_FIELDS.values())


def test_ledger_keeps_not_a_number_as_text_when_logged(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    writer.append("user_values", step=1, values={"loss": float("nan"), "top": [float("inf"), 1.5]})
    writer.close()
    assert read_ledger(tmp_path)[0].fields["values"] == {"loss": "nan", "top": ["inf", 1.5]}


def test_ledger_shortens_a_text_when_it_is_too_long(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    text = "start" + "x" * 10 * MAX_TEXT + "end"
    writer.append("failure", rank=0, worker_id="w", step=1, error_type="E", message=text, traceback="")
    writer.close()
    message = read_ledger(tmp_path)[0].fields["message"]
    assert len(message) < MAX_TEXT + 100
    assert message.startswith("start")
    assert message.endswith("end")
    assert "characters left out" in message


def test_ledger_drops_events_when_they_come_after_close(tmp_path: Path) -> None:
    told: list[str] = []
    writer = LedgerWriter(ledger_path(tmp_path, "n"), RUN, "n", ManualClock(), on_problem=told.append)
    writer.close()
    assert writer.append("node_started") is False
    assert writer.append("node_started") is False
    assert writer.dropped == 2
    assert len(told) == 1


def test_ledger_raises_a_config_error_when_its_folder_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("a file where the folder belongs")
    with pytest.raises(ConfigError, match="--run-dir"):
        open_writer(tmp_path)
    with pytest.raises(ConfigError, match="node id"):
        ledger_path(tmp_path, "../evil")


def test_ledger_chain_is_whole_when_many_threads_append(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    threads = [
        threading.Thread(target=lambda: [writer.append("evaluated", step=n, result=1) for n in range(200)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    entries = read_ledger(tmp_path)
    assert (len(entries), entries.problems) == (800, [])


FULL_DISK = """
import resource, sys
from pathlib import Path
from elastictrain.clock import ManualClock
from elastictrain.ledger import LedgerWriter, ledger_path

told = []
writer = LedgerWriter(ledger_path(Path(sys.argv[1]), "n"), "run-1", "n", ManualClock(), on_problem=told.append)
writer.append("evaluated", step=0, result=0)
# A limit on file sizes fails a write exactly as a full disk does: first a short write, then errors.
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (writer.path.stat().st_size + 50, hard))
assert [writer.append("evaluated", step=n, result=n) for n in (1, 2, 3)] == [False] * 3
assert writer.dropped == 3 and len(told) == 1, told
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
assert writer.append("evaluated", step=4, result=4)
writer.close()
assert len(told) == 2 and writer.dropped == 3, told
"""


def test_ledger_counts_what_is_lost_and_goes_on_when_the_disk_was_full(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], check=True, timeout=30)
    entries = read_ledger(tmp_path)
    assert entries.problems == []
    assert [entry.event for entry in entries] == ["evaluated", "gap", "evaluated"]
    assert entries[1].fields["lost"] == 3
    assert entries[2].fields["step"] == 4


ENDLESS = """
import sys
from pathlib import Path
from elastictrain.clock import SystemClock
from elastictrain.ledger import LedgerWriter, ledger_path

writer = LedgerWriter(ledger_path(Path(sys.argv[1]), "n"), "run-1", "n", SystemClock())
step = 0
while True:
    step += 1
    writer.append("evaluated", step=step, result="x" * (step % 5000))
    if step % 100 == 0:
        print(step, flush=True)
"""


def test_ledger_keeps_every_event_told_as_written_when_its_process_is_killed(tmp_path: Path) -> None:
    for _ in range(3):
        command = [sys.executable, "-c", ENDLESS, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            written = [int(process.stdout.readline()) for _ in range(5)][-1]
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=10)
        writer = LedgerWriter(ledger_path(tmp_path, "n"), RUN, "n", SystemClock())
        writer.close()
        entries = read_ledger(tmp_path)
        assert entries.problems == []
        assert max(entry.fields.get("step", 0) for entry in entries) >= written


def test_ledger_append_costs_microseconds(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    clock = SystemClock()
    started_s = clock.now_s()
    for step in range(2000):
        writer.append("evaluated", step=step, result=0.5)
    mean_us = (clock.now_s() - started_s) / 2000 * 1e6
    writer.close()
    print(f"append: {mean_us:.1f} us")
    assert mean_us < 500  # about 20 on an idle machine
