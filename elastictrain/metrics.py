"""The metrics of one node: one table of names, the numbers of its workers, and where their time went.

The agent calls `RunMetrics` with what its workers report; a scrape reads a copy of the numbers. Per-rank series exist
only while a worker holds the rank; their counters go on where they were when the rank is taken again: none goes back.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from elastictrain.clock import Clock
from elastictrain.errors import InternalError
from elastictrain.ledger import RECOVERY_STAGES, STEP_STAGES
from elastictrain.time_account import TimeAccount

REPLACEMENT_SOURCES = ("spare", "new")
MAX_USER_NAMES = 64
MAX_NAME_LENGTH = 80
MAX_CAUSES = 32
OTHER_CAUSE = "other"

_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_RECOVERY_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_CHECKPOINT_BUCKETS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_UNFIT_CHARACTER = re.compile(r"[^A-Za-z0-9_.:/@-]")


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric; every one has the label `run` as well."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "summary"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def unit(self) -> str:
        """The base unit that the name ends with, empty where it has none."""
        stem = self.name.removesuffix("_total")
        return next((unit for unit in ("seconds", "ratio") if stem.endswith(f"_{unit}")), "")


_SPECS = (
    MetricSpec("elastictrain_steps_total", "counter", "Steps committed by the worker at this rank.", ("rank",)),
    MetricSpec("elastictrain_samples_total", "counter", "Samples this rank computed in committed steps.", ("rank",)),
    MetricSpec("elastictrain_step_seconds", "histogram", "Time of committed steps.", ("rank",), _STEP_BUCKETS),
    MetricSpec("elastictrain_step_stage_seconds", "summary", "Time of one stage of a step.", ("rank", "stage")),
    MetricSpec("elastictrain_committed_steps_total", "counter", "Steps the run committed, whoever took part."),
    MetricSpec("elastictrain_committed_samples_total", "counter", "Samples of this node's workers, gone ones too."),
    MetricSpec("elastictrain_step", "gauge", "The newest committed step."),
    MetricSpec("elastictrain_world_size", "gauge", "Workers in the current round, on all nodes."),
    MetricSpec("elastictrain_generation", "gauge", "Number of the current round."),
    MetricSpec("elastictrain_recoveries_total", "counter", "Recoveries by what broke the round.", ("cause",)),
    MetricSpec(
        "elastictrain_recovery_seconds", "histogram", "Time of one stage of a recovery.", ("stage",), _RECOVERY_BUCKETS
    ),
    MetricSpec("elastictrain_lost_steps_total", "counter", "Committed steps that had to be done again."),
    MetricSpec("elastictrain_spares", "gauge", "Spares of this node that wait for the place of a lost worker."),
    MetricSpec(
        "elastictrain_replacement_seconds",
        "histogram",
        "Time from the loss of a worker until another one trained in its place.",
        ("source",),
        _RECOVERY_BUCKETS,
    ),
    MetricSpec("elastictrain_worker_restarts_total", "counter", "Workers started in place of one that ended."),
    MetricSpec(
        "elastictrain_checkpoint_stall_seconds",
        "histogram",
        "Time a checkpoint kept training from going on.",
        buckets=_CHECKPOINT_BUCKETS,
    ),
    MetricSpec(
        "elastictrain_checkpoint_seconds",
        "histogram",
        "Time from the capture of a state to its durable checkpoint.",
        buckets=_CHECKPOINT_BUCKETS,
    ),
    MetricSpec("elastictrain_checkpoint_last_step", "gauge", "Step of the newest durable checkpoint."),
    MetricSpec(
        "elastictrain_time_seconds_total",
        "counter",
        "Time of this node's workers by what it went into; the kinds sum to wall time times workers.",
        ("kind",),
    ),
    MetricSpec("elastictrain_goodput_ratio", "gauge", "Productive part of this node's worker time."),
    MetricSpec("elastictrain_user_value", "gauge", "Newest value the script logged.", ("rank", "name")),
    MetricSpec("elastictrain_user_names_refused_total", "counter", "Logged values left out: too many names."),
)
METRICS: Mapping[str, MetricSpec] = MappingProxyType({spec.name: spec for spec in _SPECS})


@dataclass(slots=True)
class _Histogram:
    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @classmethod
    def of(cls, name: str) -> _Histogram:
        bounds = METRICS[name].buckets
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> _Histogram:
        return _Histogram(self.bounds, self.counts.copy(), self.total)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as the exposition format wants them."""
        rows, count = [], 0
        for bound, added in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            count += added
            rows.append((bound, float(count)))
        return rows


@dataclass(slots=True)
class _RankNumbers:
    """What is known of one rank; kept while nobody holds it, so that its counters go on."""

    is_held: bool = False
    steps: int = 0
    samples: int = 0
    step_seconds: _Histogram = field(default_factory=lambda: _Histogram.of("elastictrain_step_seconds"))
    stage_count: list[int] = field(default_factory=lambda: [0] * len(STEP_STAGES))
    stage_seconds: list[float] = field(default_factory=lambda: [0.0] * len(STEP_STAGES))
    user_values: dict[str, float] = field(default_factory=dict)

    def copy(self) -> _RankNumbers:
        return _RankNumbers(
            self.is_held,
            self.steps,
            self.samples,
            self.step_seconds.copy(),
            self.stage_count.copy(),
            self.stage_seconds.copy(),
            self.user_values.copy(),
        )


class RunMetrics:
    """The numbers of one node's workers. Thread-safe; the methods cost microseconds and never wait for a scrape.

    Raises `ValueError` from prometheus_client when the registry already carries these metrics.
    """

    def __init__(self, registry: CollectorRegistry, *, run_id: str, clock: Clock) -> None:
        self.time = TimeAccount()
        self._run_id = run_id
        self._clock = clock
        self._lock = threading.Lock()
        self._ranks: dict[int, _RankNumbers] = {}
        self._counters = dict.fromkeys((name for name, spec in METRICS.items() if _is_plain(spec, "counter")), 0)
        self._gauges: dict[str, float] = {"elastictrain_spares": 0}
        self._step: int | None = None
        self._recoveries: dict[str, int] = {}
        self._recovery_seconds = {stage: _Histogram.of("elastictrain_recovery_seconds") for stage in RECOVERY_STAGES}
        self._replacement_seconds = {
            source: _Histogram.of("elastictrain_replacement_seconds") for source in REPLACEMENT_SOURCES
        }
        self._checkpoint_seconds = _Histogram.of("elastictrain_checkpoint_seconds")
        self._checkpoint_stall_seconds = _Histogram.of("elastictrain_checkpoint_stall_seconds")
        self._user_names: dict[str, str] = {}  # as logged: as exposed
        registry.register(self)

    def worker_entered(self, rank: int) -> None:
        """A worker of this node takes this rank: its series appear."""
        with self._lock:
            self._ranks.setdefault(rank, _RankNumbers()).is_held = True

    def worker_left(self, rank: int) -> None:
        """Nobody of this node holds the rank any more: its series disappear, its counters wait for the next holder."""
        with self._lock:
            numbers = self._ranks.get(rank)
            if numbers is not None:
                numbers.is_held = False
                numbers.user_values.clear()

    def committed(
        self, rank: int, *, step: int, samples: int, seconds: float, stages: Mapping[str, float] | None = None
    ) -> None:
        """This rank committed `step` with `samples` of its own, in `seconds`; `stages`: seconds by step stage."""
        indices = [(_stage_index(stage, STEP_STAGES), value) for stage, value in (stages or {}).items()]
        with self._lock:
            numbers = self._ranks.get(rank)
            if numbers is None:
                numbers = self._ranks[rank] = _RankNumbers(is_held=True)
            numbers.steps += 1
            numbers.samples += samples
            numbers.step_seconds.observe(seconds)
            for index, value in indices:
                numbers.stage_count[index] += 1
                numbers.stage_seconds[index] += value
            self._counters["elastictrain_committed_samples_total"] += samples
            # All ranks report the same step: only the first report of it counts for the run.
            if self._step is None or step > self._step:
                self._counters["elastictrain_committed_steps_total"] += 1 if self._step is None else step - self._step
                self._step = step
                self._gauges["elastictrain_step"] = step

    def set_round(self, *, generation: int, world_size: int) -> None:
        with self._lock:
            self._gauges["elastictrain_generation"] = generation
            self._gauges["elastictrain_world_size"] = world_size

    def recovered(self, cause: str, seconds_by_stage: Mapping[str, float]) -> None:
        """A broken round was replaced; `seconds_by_stage` holds the stages that took place."""
        for stage in seconds_by_stage:
            _stage_index(stage, RECOVERY_STAGES)
        with self._lock:
            if cause not in self._recoveries and len(self._recoveries) >= MAX_CAUSES:
                cause = OTHER_CAUSE
            self._recoveries[cause] = self._recoveries.get(cause, 0) + 1
            for stage, seconds in seconds_by_stage.items():
                self._recovery_seconds[stage].observe(seconds)

    def replaced(self, source: str, seconds: float) -> None:
        """A worker trains in the place of one that was lost `seconds` ago; `source` is one of REPLACEMENT_SOURCES."""
        with self._lock:
            self._replacement_seconds[source].observe(seconds)

    def set_spares(self, count: int) -> None:
        with self._lock:
            self._gauges["elastictrain_spares"] = count

    def rewound(self, *, to_step: int) -> None:
        """The run goes on from an older step: the steps after it are lost and will be committed again."""
        with self._lock:
            if self._step is not None and to_step < self._step:
                self._counters["elastictrain_lost_steps_total"] += self._step - to_step
            self._step = to_step
            self._gauges["elastictrain_step"] = to_step

    def worker_restarted(self) -> None:
        with self._lock:
            self._counters["elastictrain_worker_restarts_total"] += 1

    def checkpointed(self, *, step: int, seconds: float, stall_seconds: float) -> None:
        """A checkpoint became durable; `stall_seconds` of its time kept training from going on."""
        with self._lock:
            self._checkpoint_seconds.observe(seconds)
            self._checkpoint_stall_seconds.observe(stall_seconds)
            self._gauges["elastictrain_checkpoint_last_step"] = step

    def user_values(self, rank: int, values: Mapping[str, float]) -> None:
        """Newest values the script logged at this rank. At most 64 names per run; odd characters become '_'."""
        with self._lock:
            numbers = self._ranks.get(rank)
            if numbers is None:
                numbers = self._ranks[rank] = _RankNumbers(is_held=True)
            for name, value in values.items():
                exposed = self._user_names.get(name) or self._admit_name(name)
                if exposed is None:
                    self._counters["elastictrain_user_names_refused_total"] += 1
                else:
                    numbers.user_values[exposed] = float(value)

    def _admit_name(self, name: str) -> str | None:
        if len(self._user_names) >= MAX_USER_NAMES:
            return None
        exposed = _UNFIT_CHARACTER.sub("_", name)[:MAX_NAME_LENGTH] or "_"
        self._user_names[name] = exposed
        return exposed

    def describe(self) -> Iterable[Metric]:
        """The families without samples, by which the registry finds two collectors with the same names."""
        return [_family(spec) for spec in METRICS.values()]

    def collect(self) -> Iterator[Metric]:
        """All series now. Runs in the exporter's thread: copies the numbers under the lock, writes them out after."""
        time_by_kind = self.time.totals(now_s=self._clock.now_s())
        with self._lock:
            ranks = {rank: numbers.copy() for rank, numbers in sorted(self._ranks.items()) if numbers.is_held}
            plain = {**self._counters, **self._gauges}
            recoveries = dict(self._recoveries)
            histograms: dict[str, dict[tuple[str, ...], _Histogram]] = {
                "elastictrain_replacement_seconds": {
                    (source,): histogram.copy() for source, histogram in self._replacement_seconds.items()
                },
                "elastictrain_checkpoint_seconds": {(): self._checkpoint_seconds.copy()},
                "elastictrain_checkpoint_stall_seconds": {(): self._checkpoint_stall_seconds.copy()},
                "elastictrain_recovery_seconds": {
                    (stage,): histogram.copy() for stage, histogram in self._recovery_seconds.items()
                },
            }
        all_seconds = sum(time_by_kind.values())
        if all_seconds > 0:
            plain["elastictrain_goodput_ratio"] = time_by_kind["productive"] / all_seconds
        values: dict[str, dict[tuple[str, ...], float]] = {name: {(): value} for name, value in plain.items()}
        values["elastictrain_recoveries_total"] = {(cause,): count for cause, count in recoveries.items()}
        values["elastictrain_time_seconds_total"] = {(kind,): seconds for kind, seconds in time_by_kind.items()}
        values["elastictrain_steps_total"] = {(str(rank),): n.steps for rank, n in ranks.items()}
        values["elastictrain_samples_total"] = {(str(rank),): n.samples for rank, n in ranks.items()}
        values["elastictrain_user_value"] = {
            (str(rank), name): value for rank, n in ranks.items() for name, value in sorted(n.user_values.items())
        }
        histograms["elastictrain_step_seconds"] = {(str(rank),): n.step_seconds for rank, n in ranks.items()}
        summaries: dict[tuple[str, ...], tuple[int, float]] = {
            (str(rank), stage): (n.stage_count[index], n.stage_seconds[index])
            for rank, n in ranks.items()
            for index, stage in enumerate(STEP_STAGES)
        }
        for name, spec in METRICS.items():
            yield _filled(spec, self._run_id, values.get(name, {}), histograms.get(name, {}), summaries)


def _is_plain(spec: MetricSpec, kind: str) -> bool:
    return spec.kind == kind and not spec.labels


def _stage_index(stage: str, stages: Sequence[str]) -> int:
    try:
        return stages.index(stage)
    except ValueError:
        raise InternalError(f"stage {stage!r} is not one of {tuple(stages)}") from None


_FAMILIES = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
    "summary": SummaryMetricFamily,
}


def _family(spec: MetricSpec) -> Metric:
    family: Metric = _FAMILIES[spec.kind](spec.name, spec.help, labels=("run", *spec.labels), unit=spec.unit)
    return family


def _filled(
    spec: MetricSpec,
    run_id: str,
    values: Mapping[tuple[str, ...], float],
    histograms: Mapping[tuple[str, ...], _Histogram],
    summaries: Mapping[tuple[str, ...], tuple[int, float]],
) -> Metric:
    """The family of one metric with its series; the labels are the run and then those of the key."""
    family = _family(spec)
    match family:
        case HistogramMetricFamily():
            for key, histogram in histograms.items():
                family.add_metric((run_id, *key), histogram.buckets(), histogram.total)
        case SummaryMetricFamily():
            for key, (count, total) in summaries.items():
                family.add_metric((run_id, *key), count, total)
        case CounterMetricFamily() | GaugeMetricFamily():
            for key, value in values.items():
                family.add_metric((run_id, *key), value)
        case _:
            raise InternalError(f"metric {spec.name} has no family for kind {spec.kind}")
    return family
