"""The exactly-once proof: what it accepts, and every way in which a broken run must not pass."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_runs import RUN_ID, RecordedRun, finished_run, make_run_dir

from elastictrain.cli.verify import Proof, prove, verify_command
from elastictrain.clock import ManualClock
from elastictrain.ledger import LedgerWriter, ledger_path
from elastictrain.ledger_reader import Entry, read_ledger


def proof_of(run: RecordedRun) -> Proof:
    run.finish()
    entries = read_ledger(run.run_dir)
    assert entries.problems == []
    return prove(entries)


def first_break(run: RecordedRun) -> str:
    proof = proof_of(run)
    assert proof.first_break is not None
    return str(proof.first_break)


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    return RecordedRun(tmp_path / "run")


def test_proof_holds_when_a_run_failed_recovered_and_resumed(tmp_path: Path) -> None:
    proof = prove(read_ledger(finished_run(tmp_path)))
    assert proof.first_break is None
    assert [(epoch.epoch, epoch.samples, epoch.steps, epoch.world_sizes) for epoch in proof.epochs] == [
        (0, 10, 3, [2]),
        (1, 10, 3, [2, 3]),
        (2, 10, 3, [3]),
    ]
    assert (proof.num_steps, proof.num_finished_epochs) == (9, 3)
    assert (proof.failures_survived, proof.num_resumes, proof.steps_done_again) == ({"signal": 1}, 1, 2)


def test_verify_prints_epochs_failures_and_claim_when_the_proof_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify_command(finished_run(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "chain intact" in out
    assert "loop 0 epoch 1: 10 samples in 3 steps, world size 2, 3" in out
    assert "1 failures survived (1 signal)" in out
    assert "1 resumes, 2 steps done again" in out
    assert out.splitlines()[-1] == "every sample of 3 epochs committed exactly once"


def test_verify_exits_2_when_there_is_no_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_command(tmp_path / "nowhere") == 2
    assert verify_command(tmp_path) == 2
    assert "is no run directory" in capsys.readouterr().err


def test_verify_fails_when_the_ledger_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_command(make_run_dir(tmp_path / "empty")) == 1
    shutil.rmtree(finished_run(tmp_path / "run") / "ledger")
    assert verify_command(tmp_path / "run") == 1
    assert "holds no ledger file" in capsys.readouterr().out


def test_verify_says_there_is_nothing_to_prove_when_no_step_is_committed(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify_command(run.finish()) == 0
    assert "nothing to prove" in capsys.readouterr().out


def test_proof_counts_a_prefix_when_the_last_epoch_is_unfinished(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.train(5)
    assert proof_of(run).first_break is None
    assert verify_command(run.run_dir) == 0
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "every sample of 1 epochs committed exactly once; of loop 0 epoch 1 the first 8 samples, each once"
    )


def test_proof_breaks_when_a_step_is_committed_twice(run: RecordedRun) -> None:
    run.train(2)
    run.commit(step=2)
    assert "step 2 was committed twice without a resume" in first_break(run)


def test_proof_breaks_when_the_steps_go_back(run: RecordedRun) -> None:
    run.train(5)
    run.commit(step=2)
    assert "go back from step 5 to step 2" in first_break(run)


def test_proof_breaks_when_a_step_is_missing(run: RecordedRun) -> None:
    run.train(2)
    run.step = 3
    run.commit()
    assert "steps 3 to 3 are missing before the commit of step 4" in first_break(run)


def test_proof_breaks_when_the_first_step_is_not_1(run: RecordedRun) -> None:
    run.step = 1
    run.commit()
    assert "steps 1 to 1 are missing" in first_break(run)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"start": 3}, "samples repeated"),
        ({"start": 5}, "samples skipped"),
        ({"stop": 4}, "an empty range"),
        ({"stop": 1}, "an empty range"),
        ({"stop": 11}, "has only 10 samples"),
        ({"start": -1}, "samples repeated"),
        ({"epoch": 1, "start": 0}, "loop 0 epoch 1 begins, but loop 0 epoch 0 stopped at 4 of 10 samples"),
        ({"epoch_length": 12}, "changed from 10 to 12"),
        ({"epoch_length": None}, "changed from 10 to"),
        ({"generation": 0}, "generation 0 after one of generation 1"),
        ({"epoch_length": "many"}, "malformed field"),
        ({"step": "2"}, "malformed field"),
        ({"stop": 1 << 70}, "malformed field"),
    ],
)
def test_proof_breaks_when_one_commit_is_wrong(run: RecordedRun, changed: dict[str, object], message: str) -> None:
    run.commit()
    run.commit(**changed)
    run.commit()
    text = first_break(run)
    assert message in text
    assert text.startswith("ledger/node0.jsonl:3: ")


def test_proof_breaks_when_an_epoch_is_left_out_or_repeated(tmp_path: Path) -> None:
    for epoch in (2, 0):
        run = RecordedRun(tmp_path / str(epoch))
        run.train(3)
        run.epoch = epoch
        run.commit()
        assert ("missing or repeated" if epoch else "samples repeated") in first_break(run)


def test_proof_breaks_when_the_first_epoch_is_missing(run: RecordedRun) -> None:
    run.epoch = 1
    run.commit()
    assert "loop 0 epoch 1 begins, but the epochs before it are missing" in first_break(run)


def test_proof_holds_when_two_loops_share_the_epochs_of_one_epoch_loop(run: RecordedRun) -> None:
    for epoch in (0, 1):
        for loop in (2 * epoch, 2 * epoch + 1):
            run.commit(loop=loop, epoch=epoch, start=0, stop=10)
    assert proof_of(run).first_break is None


def test_proof_breaks_when_an_epoch_is_declared_finished_too_early(run: RecordedRun) -> None:
    run.commit()
    run.writer.append("epoch_finished", loop=0, epoch=0, samples=4)
    assert "declared finished with 4 samples, but 4 of 10 are committed" in first_break(run)


def test_proof_breaks_when_an_epoch_is_declared_finished_with_another_count(run: RecordedRun) -> None:
    run.train(3)
    run.writer.append("epoch_finished", loop=0, epoch=0, samples=9)
    assert "declared finished with 9 samples" in first_break(run)


def test_proof_breaks_when_a_resume_is_ahead_of_the_commits(run: RecordedRun) -> None:
    run.train(2)
    run.die_and_resume(at_step=3, epoch=1, position=0)
    assert "resumed after step 3, but only 2 commits" in first_break(run)


def test_proof_breaks_when_a_resumed_run_repeats_other_samples(run: RecordedRun) -> None:
    """The cursor of the checkpoint was wrong by one batch."""
    run.train(5)
    run.die_and_resume(at_step=4, epoch=1, position=0)
    run.train(3)
    assert "samples repeated" in first_break(run)


def test_proof_breaks_when_synced_events_had_vanished_at_a_restart(run: RecordedRun) -> None:
    run.train(5)
    run.writer.close()
    path = ledger_path(run.run_dir, "node0")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
    run.open()
    assert "2 events that had been on disk were gone" in first_break(run)


def test_proof_accepts_a_declared_epoch_again_when_the_run_resumed_at_its_end(run: RecordedRun) -> None:
    run.train(4)
    run.die_and_resume(at_step=3, epoch=1, position=0)
    run.writer.append("epoch_finished", loop=0, epoch=0, samples=10)
    run.train(3)
    proof = proof_of(run)
    assert proof.first_break is None
    assert proof.num_finished_epochs == 2


def test_proof_takes_the_declared_length_when_a_stream_has_none(run: RecordedRun) -> None:
    for start, stop in ((0, 4), (4, 8), (8, 9)):
        run.commit(start=start, stop=stop, epoch_length=None)
    run.commit(epoch=1, start=0, stop=4, epoch_length=None)
    assert "loop 0 epoch 1 begins, but loop 0 epoch 0 stopped at 9 samples" in first_break(run)


def test_proof_holds_when_a_stream_declares_its_end_and_loops_follow_each_other(run: RecordedRun) -> None:
    for start, stop in ((0, 4), (4, 8), (8, 9)):
        run.commit(start=start, stop=stop, epoch_length=None)
    run.writer.append("epoch_finished", loop=0, epoch=0, samples=9)
    run.commit(loop=1, epoch=0, start=0, stop=4, epoch_length=None)
    proof = proof_of(run)
    assert proof.first_break is None
    assert [(epoch.loop, epoch.is_finished) for epoch in proof.epochs] == [(0, True), (1, False)]


def test_verify_mentions_lost_events_when_a_gap_explains_missing_steps(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.train(1)
    run.writer.append("gap", lost=1, error="No space left on device")
    run.step = 2
    run.commit()
    assert verify_command(run.finish()) == 1
    assert "(1 events were lost before: No space left on device)" in capsys.readouterr().out


def test_verify_names_the_chain_first_when_a_damaged_line_also_breaks_the_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ledger_path(finished_run(tmp_path), "node0")
    path.write_bytes(path.read_bytes().replace(b'"step":7,"loop"', b'"step":8,"loop"'))
    assert verify_command(tmp_path) == 1
    assert "BROKEN: ledger/node0.jsonl:13: altered" in capsys.readouterr().out


@pytest.fixture(scope="module")
def lines_and_head(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[bytes], bytes]:
    path = ledger_path(finished_run(tmp_path_factory.mktemp("verify")), "node0")
    return path.read_bytes().splitlines(keepends=True), path.with_suffix(".head").read_bytes()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_verify_fails_when_any_single_line_is_altered_removed_copied_or_moved(
    lines_and_head: tuple[list[bytes], bytes], tmp_path: Path, data: st.DataObject
) -> None:
    lines, head = lines_and_head
    index = data.draw(st.integers(0, len(lines) - 1), label="line")
    changed = list(lines)
    match data.draw(st.sampled_from(["byte", "delete byte", "remove", "copy", "move"]), label="change"):
        case "byte":
            at = data.draw(st.integers(0, len(lines[index]) - 1), label="at")
            byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != lines[index][at]), label="byte")
            changed[index] = lines[index][:at] + bytes([byte]) + lines[index][at + 1 :]
        case "delete byte":
            at = data.draw(st.integers(0, len(lines[index]) - 1), label="at")
            changed[index] = lines[index][:at] + lines[index][at + 1 :]
        case "remove":
            del changed[index]
        case "copy":
            changed.insert(data.draw(st.integers(0, len(lines)), label="to"), lines[index])
        case "move":
            to = data.draw(st.integers(0, len(lines) - 1).filter(lambda to: to != index), label="to")
            changed.insert(to, changed.pop(index))
    run_dir = make_run_dir(tmp_path / "run")
    path = ledger_path(run_dir, "node0")
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".head").write_bytes(head)
    path.write_bytes(b"".join(lines))
    assert verify_command(run_dir) == 0
    path.write_bytes(b"".join(changed))
    assert verify_command(run_dir) == 1


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_proof_breaks_when_any_commit_of_a_right_run_is_left_out_or_shifted(data: st.DataObject) -> None:
    """The chain aside: the fold alone sees every wrong set of samples."""
    length = data.draw(st.integers(5, 40), label="length")
    batch = data.draw(st.integers(1, 7), label="batch")
    entries = list(commits(length=length, batch=batch, epochs=3))
    assert prove(entries).first_break is None
    index = data.draw(st.integers(0, len(entries) - 2), label="commit")
    shift = data.draw(st.integers(-3, 3), label="shift")
    if shift == 0:
        entries = [*entries[:index], *(renumbered(entry, -1) for entry in entries[index + 1 :])]
    else:
        fields = entries[index].fields
        changed = {**fields, "start": fields["start"] + shift, "stop": fields["stop"] + shift}
        entries[index] = entries[index]._replace(fields=changed)
    assert prove(entries).first_break is not None


def renumbered(entry: Entry, by: int) -> Entry:
    return entry._replace(fields={**entry.fields, "step": entry.fields["step"] + by})


def commits(*, length: int, batch: int, epochs: int) -> Iterator[Entry]:
    step = 0
    for epoch in range(epochs):
        for start in range(0, length, batch):
            step += 1
            fields = {
                "step": step,
                "loop": 0,
                "epoch": epoch,
                "start": start,
                "stop": min(length, start + batch),
                "epoch_length": length,
                "batch_size": batch,
                "world_size": 2,
                "generation": 1,
            }
            yield Entry("n", step, step, 0.0, 0.0, "commit", fields)


def test_verify_reads_a_million_commits_in_seconds(tmp_path: Path) -> None:
    """A tenth of them here, in processor seconds: a million must stay under fifteen."""
    make_run_dir(tmp_path)
    writer = LedgerWriter(ledger_path(tmp_path, "n"), RUN_ID, "n", ManualClock())
    for entry in commits(length=100_000 * 64, batch=64, epochs=1):
        writer.append("commit", **entry.fields)
    writer.close()
    started_s = time.process_time()
    assert verify_command(tmp_path) == 0
    seconds = time.process_time() - started_s
    print(f"100,000 commits verified in {seconds:.2f} s")
    assert seconds < 3.0


def test_verify_and_status_start_without_torch_when_imported() -> None:
    code = (
        "import sys, elastictrain.cli.verify, elastictrain.cli.status, elastictrain.cli.checkpoints;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'prometheus_client')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
