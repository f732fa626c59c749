"""`elastictrain verify`: prove from the ledger that each sample of each finished epoch was committed exactly once.

The proof has two parts: the hash chain of every file is whole, and the commits, folded in order, form one lineage of
steps 1, 2, 3, ... whose sample ranges fill each epoch from 0 to its end without overlap or hole. A `resumed` event at
step c cuts the lineage back to c: the later steps were lost with the processes, and were done again.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from elastictrain.errors import ConfigError
from elastictrain.ledger import PLANNED_CAUSES, ledger_folder
from elastictrain.ledger_reader import Entry, LedgerScan, read_run_id

UNKNOWN_LENGTH = -1
MAX_EPOCHS_PRINTED = 40


@dataclass(frozen=True, slots=True)
class Break:
    """The first place where the claim does not hold; `node` and `line` name the ledger line, where there is one."""

    message: str
    node: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        return f"ledger/{self.node}.jsonl:{self.line}: {self.message}" if self.node is not None else self.message


@dataclass(slots=True)
class EpochSummary:
    """What the lineage committed of one epoch of one loop; `length` None where the data set has no known length."""

    loop: int
    epoch: int
    length: int | None
    samples: int = 0
    steps: int = 0
    world_sizes: list[int] = field(default_factory=list)
    finished_samples: int | None = None
    is_left: bool = False
    """The script ended this epoch before its end, and said so."""

    @property
    def is_finished(self) -> bool:
        expected = self.length if self.finished_samples is None else self.finished_samples
        return self.samples == expected

    def __str__(self) -> str:
        return f"loop {self.loop} epoch {self.epoch}"


@dataclass(frozen=True, slots=True)
class Proof:
    """The outcome of the fold. `steps_done_again`: committed, lost with the processes, and cut off by a resume."""

    epochs: tuple[EpochSummary, ...]
    num_events: int
    num_steps: int
    failures_survived: dict[str, int]
    num_resumes: int
    steps_done_again: int
    notices: tuple[str, ...]
    first_break: Break | None

    @property
    def num_finished_epochs(self) -> int:
        return sum(epoch.is_finished for epoch in self.epochs)


class _Broken(Exception):  # noqa: N818 (control flow inside this module)
    """Ends the fold at the first break."""


class _Lineage:
    """The committed steps that stand, step n at index n-1, in columns because there may be millions."""

    def __init__(self) -> None:
        self.keys: dict[tuple[int, int], int] = {}
        self.nodes: dict[str, int] = {}
        self.key, self.start, self.stop, self.length, self.world_size, self.node, self.line = self._shown = tuple(
            array("q") for _ in range(7)
        )
        self.made_in = array("q")  # generation
        self._columns = (*self._shown, self.made_in)
        self.finished: list[
            tuple[int, tuple[int, int], int, Break]
        ] = []  # (steps before it, epoch, samples, its place)
        self.left: list[tuple[int, tuple[int, int]]] = []  # (steps before it, epoch)
        self.generation = -1

    def __len__(self) -> int:
        return len(self.line)

    def append(self, entry: Entry) -> None:
        fields = entry.fields
        length = fields["epoch_length"]
        self.key.append(self.keys.setdefault((fields["loop"], fields["epoch"]), len(self.keys)))
        self.start.append(fields["start"])
        self.stop.append(fields["stop"])
        self.length.append(UNKNOWN_LENGTH if length is None else length)
        self.world_size.append(fields["world_size"])
        self.node.append(self.nodes.setdefault(entry.node, len(self.nodes)))
        self.line.append(entry.line)
        self.made_in.append(fields["generation"])

    def has(self, entry: Entry) -> bool:
        """Whether another node has told of this very commit."""
        fields, at = entry.fields, entry.fields["step"] - 1
        key = self.keys.get((fields["loop"], fields["epoch"]))
        mine = (key, fields["start"], fields["stop"], fields["generation"])
        known = (self.key[at], self.start[at], self.stop[at], self.made_in[at])
        return mine == known and self.nodes.get(entry.node) != self.node[at]

    def is_superseded_by(self, entry: Entry) -> bool:
        """Whether `entry` does the newest step again in a later generation: who had committed it before is gone."""
        at = entry.fields["step"] - 1
        is_newest = at == len(self) - 1 and bool(entry.fields["generation"] > self.made_in[at])
        return is_newest and self.nodes.get(entry.node) != self.node[at]

    def cut(self, steps: int) -> None:
        for column in self._columns:
            del column[steps:]
        self.finished = [item for item in self.finished if item[0] <= steps]
        self.left = [item for item in self.left if item[0] <= steps]
        self.generation = -1

    def rows(self) -> Iterator[tuple[int, ...]]:
        return zip(*self._shown, strict=True)


class _Fold:
    """Takes the events in order; raises _Broken at one that contradicts those before it."""

    def __init__(self) -> None:
        self.lineage = _Lineage()
        self.num_events = 0
        self.survived: Counter[str] = Counter()
        self.recorded_by: dict[int, str] = {}
        self.num_resumes = 0
        self.steps_done_again = 0
        self.notices: list[str] = []
        self.gap: str = ""
        self.first_break: Break | None = None

    def take(self, entry: Entry) -> None:
        self.num_events += 1
        match entry.event:
            case "commit":
                self._commit(entry)
            case "resumed":
                self._resumed(entry)
            case "epoch_finished":
                key = (entry.fields["loop"], entry.fields["epoch"])
                place = Break("", entry.node, entry.line)
                self.lineage.finished.append((len(self.lineage), key, entry.fields["samples"], place))
            case "epoch_left":
                self.lineage.left.append((len(self.lineage), (entry.fields["loop"], entry.fields["epoch"])))
            case "recovered":
                # Every node records it; one line counts.
                first = self.recorded_by.setdefault(entry.fields["generation"], entry.node)
                if first == entry.node and entry.fields["cause"] not in PLANNED_CAUSES:
                    self.survived[str(entry.fields["cause"])] += 1
            case "torn" if entry.fields["missing"]:
                missing = entry.fields["missing"]
                raise _Broken(f"truncated: {missing} events that had been on disk were gone when the run came back")
            case "torn":
                self.notices.append(f"{entry.node}: a line torn by a crash was set aside in {entry.fields['kept_in']}")
            case "gap":
                self.gap = f" ({entry.fields['lost']} events were lost before: {entry.fields['error']})"
                self.notices.append(f"{entry.node}: {entry.fields['lost']} events were lost: {entry.fields['error']}")
            case _:
                pass

    def _commit(self, entry: Entry) -> None:
        step, generation, next_step = entry.fields["step"], entry.fields["generation"], len(self.lineage) + 1
        if 0 < step < next_step and self.lineage.has(entry):
            return
        if step == next_step - 1 and self.lineage.is_superseded_by(entry):
            self.lineage.cut(step - 1)
            next_step = step
        if step != next_step:
            if step > next_step:
                raise _Broken(f"steps {next_step} to {step - 1} are missing before the commit of step {step}{self.gap}")
            if step == next_step - 1:
                raise _Broken(f"step {step} was committed twice without a resume between")
            raise _Broken(f"the commits go back from step {next_step - 1} to step {step} without a resume between")
        if generation < self.lineage.generation:
            newest = self.lineage.generation
            raise _Broken(f"step {step} was committed in generation {generation} after one of generation {newest}")
        self.lineage.generation = generation
        self.lineage.append(entry)

    def _resumed(self, entry: Entry) -> None:
        step, committed = entry.fields["step"], len(self.lineage)
        if step > committed:
            raise _Broken(f"the run resumed after step {step}, but only {committed} commits are recorded{self.gap}")
        self.num_resumes += 1
        self.recorded_by = {}
        self.steps_done_again += committed - step
        self.lineage.cut(step)


def prove(entries: Iterable[Entry]) -> Proof:
    """Fold the events of a run into the proof, or up to the first break. Pure; a million commits take about 3 s."""
    fold = _Fold()
    epochs: tuple[EpochSummary, ...] = ()
    for entry in entries:
        try:
            fold.take(entry)
        except _Broken as broken:
            fold.first_break = Break(str(broken), entry.node, entry.line)
            break
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            # The hash is right and the fields are wrong: written by another version, or by a broken writer.
            message = f"event {entry.event!r} has a missing or malformed field ({type(error).__name__}: {error})"
            fold.first_break = Break(message, entry.node, entry.line)
            break
    else:
        epochs, fold.first_break = _check_ranges(fold.lineage)
    return Proof(
        epochs=epochs,
        num_events=fold.num_events,
        num_steps=len(fold.lineage),
        failures_survived=dict(fold.survived),
        num_resumes=fold.num_resumes,
        steps_done_again=fold.steps_done_again,
        notices=tuple(fold.notices),
        first_break=fold.first_break,
    )


def _check_ranges(lineage: _Lineage) -> tuple[tuple[EpochSummary, ...], Break | None]:
    """Whether the ranges of the lineage partition every epoch: its summaries, and the first break."""
    names = list(lineage.keys)
    nodes = list(lineage.nodes)
    finished = {key: samples for _, key, samples, _ in lineage.finished}
    left = {key for _, key in lineage.left}
    epochs: dict[int, EpochSummary] = {}
    newest: dict[int, EpochSummary] = {}  # by loop
    latest: EpochSummary | None = None  # of any loop
    for step, (key, start, stop, length, world_size, node, line) in enumerate(lineage.rows(), start=1):
        epoch = epochs.get(key)
        complaint = None
        if epoch is None:
            loop, number = names[key]
            known_length = None if length == UNKNOWN_LENGTH else length
            epoch = EpochSummary(
                loop,
                number,
                known_length,
                finished_samples=finished.get((loop, number)),
                is_left=(loop, number) in left,
            )
            complaint = _follows(newest[loop], epoch) if loop in newest else _begins(latest, epoch)
            epochs[key] = newest[loop] = latest = epoch
        if complaint is None and (
            start != epoch.samples or stop <= start or not (length == UNKNOWN_LENGTH or stop <= length)
        ):
            complaint = _range_complaint(epoch, start, stop)
        if complaint is None and (UNKNOWN_LENGTH if epoch.length is None else epoch.length) != length:
            complaint = f"the length of {epoch} changed from {epoch.length} to {length} samples"
        if complaint is not None:
            return tuple(epochs.values()), Break(f"step {step}: {complaint}", nodes[node], line)
        epoch.samples = stop
        epoch.steps += 1
        if not epoch.world_sizes or epoch.world_sizes[-1] != world_size:
            epoch.world_sizes.append(world_size)
    return tuple(epochs.values()), _check_finished(lineage, epochs)


def _check_finished(lineage: _Lineage, epochs: dict[int, EpochSummary]) -> Break | None:
    """Every epoch that was declared finished holds as many samples as declared, and all that there are."""
    for _, key, samples, place in lineage.finished:
        epoch = epochs.get(lineage.keys.get(key, -1)) or EpochSummary(*key, length=None)
        expected = epoch.samples if epoch.length is None else epoch.length
        if samples != epoch.samples or samples != expected:
            message = (
                f"{epoch} is declared finished with {samples} samples, but {epoch.samples} of {expected} are committed"
            )
            return Break(message, place.node, place.line)
    return None


def _begins(latest: EpochSummary | None, epoch: EpochSummary) -> str | None:
    """Why a loop cannot begin with this epoch: it starts at 0, or inside an epoch loop where that one is."""
    if epoch.epoch == 0 or (latest is not None and epoch.epoch - latest.epoch in (0, 1)):
        return None
    return f"{epoch} begins, but the epochs before it are missing"


def _follows(before: EpochSummary, epoch: EpochSummary) -> str | None:
    """Why this epoch cannot come after the one before it in the same loop."""
    if not (before.is_finished or before.is_left):
        of = "" if before.length is None else f" of {before.length}"
        return f"{epoch} begins, but {before} stopped at {before.samples}{of} samples"
    if epoch.epoch != before.epoch + 1:
        return f"{epoch} follows {before}: the epochs between are missing or repeated"
    return None


def _range_complaint(epoch: EpochSummary, start: int, stop: int) -> str:
    seen = f"{epoch} commits samples [{start}, {stop})"
    if stop <= start:
        return f"{seen}, an empty range"
    if start < epoch.samples:
        return f"{seen}, but those up to {epoch.samples} were committed before: samples repeated"
    if start > epoch.samples:
        return f"{seen}, but those from {epoch.samples} on were not committed: samples skipped"
    return f"{seen}, but the epoch has only {epoch.length} samples"


def verify_command(run_dir: Path) -> int:
    """Print the proof, or the first break. Exit code 0, 1 on a break, 2 where there is no run directory. Blocks."""
    try:
        if not (run_dir / "run.json").is_file() and not ledger_folder(run_dir).is_dir():
            raise ConfigError(f"{run_dir} is no run directory: expected run.json and ledger/ in it: check the path")
        run_id = read_run_id(run_dir) or run_dir.name
    except ConfigError as error:
        print(f"elastictrain: error: {error}", file=sys.stderr)
        return error.exit_code
    scan = LedgerScan(run_dir)
    entries = iter(scan)
    proof = prove(entries)
    # The fold stops at its own break; the rest of the files is read all the same, since a damaged chain explains more.
    for _ in entries:
        pass
    chain_break = next((str(problem) for problem in scan.problems if problem.is_break), None)
    print(f"run {run_id}: {proof.num_events} events in {scan.num_files} ledger files")
    if scan.num_files == 0 and chain_break is None:
        chain_break = f"{ledger_folder(run_dir)} holds no ledger file"
    first_break = chain_break or proof.first_break
    if first_break is None:
        print("chain intact")
    _print_facts(proof, [str(problem) for problem in scan.problems if not problem.is_break])
    if first_break is not None:
        print(f"BROKEN: {first_break}")
        return 1
    print(_claim(proof))
    return 0


def _print_facts(proof: Proof, torn: list[str]) -> None:
    half = MAX_EPOCHS_PRINTED // 2
    epochs: list[EpochSummary | None] = list(proof.epochs)
    if len(epochs) > MAX_EPOCHS_PRINTED:
        epochs[half:-half] = [None]
    for epoch in epochs:
        if epoch is None:
            print(f"  ... {len(proof.epochs) - 2 * half} more epochs ...")
            continue
        state = "" if epoch.is_finished else " (left by the script)" if epoch.is_left else " (unfinished)"
        of = state if epoch.is_finished or epoch.length is None else f" of {epoch.length}{state}"
        sizes = ", ".join(map(str, epoch.world_sizes[:12])) + (", ..." if len(epoch.world_sizes) > 12 else "")
        print(f"  {epoch}: {epoch.samples}{of} samples in {epoch.steps} steps, world size {sizes}")
    causes = ", ".join(f"{count} {cause}" for cause, count in sorted(proof.failures_survived.items()))
    num_survived = sum(proof.failures_survived.values())
    print(f"{num_survived} failures survived{f' ({causes})' if causes else ''}")
    print(f"{proof.num_resumes} resumes, {proof.steps_done_again} steps done again")
    for notice in (*proof.notices, *torn):
        print(f"note: {notice}")


def _claim(proof: Proof) -> str:
    claim = f"every sample of {proof.num_finished_epochs} epochs committed exactly once"
    unfinished = [epoch for epoch in proof.epochs if not epoch.is_finished]
    if not proof.epochs:
        return "no step is committed: nothing to prove"
    for epoch in unfinished:
        claim += f"; of {epoch} the first {epoch.samples} samples, each once"
    return claim
