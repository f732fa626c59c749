"""The metrics: names, series that come and go, counters that never go back, and where the time went."""

from __future__ import annotations

import shutil
import subprocess
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from elastictrain.clock import ManualClock, SystemClock
from elastictrain.errors import InternalError
from elastictrain.metrics import MAX_CAUSES, MAX_USER_NAMES, METRICS, RunMetrics
from elastictrain.time_account import TIME_KINDS, TimeAccount

DESIGNED_NAMES = {
    "elastictrain_steps_total",
    "elastictrain_samples_total",
    "elastictrain_step_seconds",
    "elastictrain_step_stage_seconds",
    "elastictrain_world_size",
    "elastictrain_generation",
    "elastictrain_recoveries_total",
    "elastictrain_recovery_seconds",
    "elastictrain_lost_steps_total",
    "elastictrain_worker_restarts_total",
    "elastictrain_checkpoint_stall_seconds",
    "elastictrain_checkpoint_seconds",
    "elastictrain_checkpoint_last_step",
    "elastictrain_time_seconds_total",
    "elastictrain_goodput_ratio",
    "elastictrain_user_value",
}


class Node:
    """A node's metrics with a registry and a clock of their own."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.registry = CollectorRegistry()
        self.metrics = RunMetrics(self.registry, run_id="run-1", clock=self.clock)

    def value(self, name: str, /, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"run": "run-1", **labels})

    def series(self) -> set[str]:
        return {str(sample.labels) for family in self.registry.collect() for sample in family.samples}

    def commit(self, rank: int, step: int, samples: int = 4) -> None:
        stages = {"draw": 0.01, "compute": 0.05, "reduce": 0.03, "commit": 0.01}
        self.metrics.committed(rank, step=step, samples=samples, seconds=0.1, stages=stages)

    def busy(self) -> Node:
        """Everything that can be measured has been measured."""
        for rank in (0, 1):
            self.metrics.worker_entered(rank)
            self.metrics.time.switch(f"w{rank}", "productive", at_s=0.0)
            self.commit(rank, 1)
        self.metrics.set_round(generation=3, world_size=2)
        self.metrics.recovered("signal", {"detect": 0.01, "agree": 0.2})
        self.metrics.checkpointed(step=1, seconds=0.5, stall_seconds=0.02)
        self.metrics.user_values(0, {"loss": 0.25})
        self.metrics.worker_restarted()
        self.metrics.replaced("spare", 0.05)
        self.clock.advance(10.0)
        return self


@pytest.fixture
def node() -> Node:
    return Node()


def test_metrics_table_holds_the_names_of_the_design() -> None:
    assert METRICS.keys() >= DESIGNED_NAMES
    for name, spec in METRICS.items():
        assert name.endswith("_total") == (spec.kind == "counter")
        assert bool(spec.buckets) == (spec.kind == "histogram")
        assert spec.help.endswith(".")


def test_metrics_expose_every_family_of_the_table_when_busy(node: Node) -> None:
    text = generate_latest(node.busy().registry).decode()
    families = {family.name: family for family in parse_text(text)}
    for name, spec in METRICS.items():
        family = families[name.removesuffix("_total") if spec.kind == "counter" else name]
        assert family.type == spec.kind
        assert family.samples, name
        assert all(sample.labels["run"] == "run-1" for sample in family.samples)
        assert all({"run", *spec.labels} == sample.labels.keys() - {"le"} for sample in family.samples)


def test_metrics_are_valid_openmetrics_when_busy(node: Node) -> None:
    node.busy()
    node.metrics.user_values(1, {'odd "name"\n\\': 1.0, "nan": float("nan"), "inf": float("inf")})
    text = generate_openmetrics(node.registry).decode()
    families = {family.name: family for family in parse_openmetrics(text)}
    assert families["elastictrain_time_seconds"].unit == "seconds"
    assert len(families) == len(METRICS)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on PATH")
def test_metrics_pass_promtool_when_busy(node: Node) -> None:
    text = generate_latest(node.busy().registry)
    result = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=30, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


def test_metrics_count_steps_and_samples_when_ranks_commit(node: Node) -> None:
    for step in (1, 2):
        node.commit(0, step, samples=4)
        node.commit(1, step, samples=3)
    assert node.value("elastictrain_steps_total", rank="0") == 2
    assert node.value("elastictrain_samples_total", rank="1") == 6
    assert node.value("elastictrain_committed_steps_total") == 2
    assert node.value("elastictrain_committed_samples_total") == 14
    assert node.value("elastictrain_step") == 2
    assert node.value("elastictrain_step_seconds_count", rank="0") == 2
    assert node.value("elastictrain_step_seconds_bucket", rank="0", le="0.05") == 0
    assert node.value("elastictrain_step_seconds_bucket", rank="0", le="0.1") == 2
    assert node.value("elastictrain_step_seconds_bucket", rank="0", le="+Inf") == 2
    assert node.value("elastictrain_step_stage_seconds_sum", rank="0", stage="reduce") == pytest.approx(0.06)


def test_metrics_series_of_a_rank_vanish_when_its_worker_left(node: Node) -> None:
    node.busy()
    before = node.value("elastictrain_committed_samples_total")
    node.metrics.worker_left(0)
    assert not any("'rank': '0'" in labels for labels in node.series())
    assert any("'rank': '1'" in labels for labels in node.series())
    assert node.value("elastictrain_committed_samples_total") == before


def test_metrics_counters_go_on_when_a_replacement_takes_the_rank(node: Node) -> None:
    node.busy()
    node.metrics.worker_left(0)
    node.metrics.worker_entered(0)
    assert node.value("elastictrain_steps_total", rank="0") == 1
    assert node.value("elastictrain_step_seconds_count", rank="0") == 1
    assert node.value("elastictrain_user_value", rank="0", name="loss") is None
    node.commit(0, 2)
    assert node.value("elastictrain_steps_total", rank="0") == 2


def test_metrics_count_lost_steps_when_the_run_goes_back_to_a_checkpoint(node: Node) -> None:
    for step in range(1, 6):
        node.commit(0, step)
    node.metrics.rewound(to_step=3)
    assert node.value("elastictrain_lost_steps_total") == 2
    assert node.value("elastictrain_step") == 3
    for step in (4, 5, 6):
        node.commit(0, step)
    assert node.value("elastictrain_committed_steps_total") == 8
    assert node.value("elastictrain_step") == 6


def test_metrics_start_counting_at_the_resumed_step_when_a_run_continues(node: Node) -> None:
    node.metrics.rewound(to_step=1000)
    node.commit(0, 1001)
    assert node.value("elastictrain_committed_steps_total") == 1
    assert node.value("elastictrain_lost_steps_total") == 0


def test_metrics_user_names_are_bounded_and_clean_when_a_script_logs_many(node: Node) -> None:
    node.metrics.worker_entered(0)
    node.metrics.user_values(0, {f"value {number}": number for number in range(MAX_USER_NAMES + 10)})
    node.metrics.user_values(0, {"value 1": 5.0})
    values = {
        sample.labels["name"]: sample.value
        for family in node.registry.collect()
        for sample in family.samples
        if family.name == "elastictrain_user_value"
    }
    assert len(values) == MAX_USER_NAMES
    assert values["value_1"] == 5.0
    assert node.value("elastictrain_user_names_refused_total") == 10


def test_metrics_causes_are_bounded_when_many_are_seen(node: Node) -> None:
    for number in range(MAX_CAUSES + 5):
        node.metrics.recovered(f"cause {number}", {})
    assert node.value("elastictrain_recoveries_total", cause="other") == 5


def test_metrics_refuse_unknown_stages_and_kinds_when_a_caller_is_wrong(node: Node) -> None:
    with pytest.raises(InternalError, match="stage 'dray'"):
        node.metrics.committed(0, step=1, samples=1, seconds=0.1, stages={"dray": 1.0})
    with pytest.raises(InternalError, match="stage 'draw'"):
        node.metrics.recovered("signal", {"draw": 1.0})
    with pytest.raises(InternalError, match="time kind"):
        node.metrics.time.switch("w", "busy", at_s=0.0)
    assert node.value("elastictrain_steps_total", rank="0") is None
    assert node.value("elastictrain_recoveries_total", cause="signal") is None


def test_metrics_refuse_a_registry_when_it_already_carries_them(node: Node) -> None:
    with pytest.raises(ValueError, match="Duplicated"):
        RunMetrics(node.registry, run_id="run-2", clock=node.clock)


def test_goodput_is_the_productive_part_when_workers_recover(node: Node) -> None:
    assert node.value("elastictrain_goodput_ratio") is None
    node.metrics.time.switch("w0", "starting", at_s=0.0)
    node.metrics.time.switch("w0", "productive", at_s=2.0)
    node.metrics.time.switch("w0", "recovering", at_s=8.0)
    node.clock.advance(10.0)
    assert node.value("elastictrain_goodput_ratio") == pytest.approx(0.6)
    assert node.value("elastictrain_time_seconds_total", kind="recovering") == pytest.approx(2.0)
    assert node.value("elastictrain_time_seconds_total", kind="idle") == 0.0


def test_time_never_goes_back_when_a_switch_is_told_late() -> None:
    account = TimeAccount()
    account.switch("w", "productive", at_s=0.0)
    assert account.totals(now_s=10.0)["productive"] == 10.0
    account.switch("w", "recovering", at_s=9.0)
    totals = account.totals(now_s=12.0)
    assert (totals["productive"], totals["recovering"]) == (10.0, 2.0)
    account.stop("w", at_s=11.0)
    account.stop("w", at_s=20.0)
    assert account.totals(now_s=30.0) == totals


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["switch", "stop", "read"]),
            st.sampled_from(["a", "b", "c"]),
            st.sampled_from(TIME_KINDS),
            st.floats(0.0, 5.0),
        ),
        max_size=40,
    )
)
@settings(deadline=None)
def test_time_kinds_sum_to_wall_time_of_workers_when_they_switch_start_and_stop(
    moves: list[tuple[str, str, str, float]],
) -> None:
    account = TimeAccount()
    now_s, expected = 0.0, 0.0
    alive: set[str] = set()
    before = account.totals(now_s=0.0)
    for move, worker, kind, passed in moves:
        now_s += passed
        expected += passed * len(alive)
        if move == "switch":
            account.switch(worker, kind, at_s=now_s)
            alive.add(worker)
        elif move == "stop":
            account.stop(worker, at_s=now_s)
            alive.discard(worker)
        totals = account.totals(now_s=now_s)
        assert sum(totals.values()) == pytest.approx(expected)
        assert all(totals[name] >= before[name] for name in TIME_KINDS)
        before = totals


def test_metrics_stay_consistent_when_scraped_while_workers_commit(node: Node) -> None:
    """A scrape sees for each rank as many histogram entries as steps, and no counter ever goes back."""
    scraped_enough = threading.Event()

    def work(rank: int) -> None:
        step = 0
        while not scraped_enough.is_set():
            step += 1
            node.commit(rank, step)
            if step % 50 == 0:
                node.metrics.worker_left(rank)
                node.metrics.worker_entered(rank)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    newest: dict[tuple[str, str], float] = {}
    try:
        for _ in range(50):
            samples = [sample for family in node.registry.collect() for sample in family.samples]
            steps = {s.labels["rank"]: s.value for s in samples if s.name == "elastictrain_steps_total"}
            counts = {s.labels["rank"]: s.value for s in samples if s.name == "elastictrain_step_seconds_count"}
            assert steps == counts
            for sample in samples:
                if sample.name.endswith("_total"):
                    key = (sample.name, str(sample.labels))
                    assert sample.value >= newest.get(key, 0.0)
                    newest[key] = sample.value
    finally:
        scraped_enough.set()
        for thread in threads:
            thread.join()


def test_metrics_calls_cost_microseconds(node: Node) -> None:
    clock = SystemClock()
    started_s = clock.now_s()
    for step in range(2000):
        node.commit(0, step)
        node.metrics.user_values(0, {"loss": 1.0, "accuracy": 0.5})
        node.metrics.time.switch("w0", "productive", at_s=float(step))
    mean_us = (clock.now_s() - started_s) / 6000 * 1e6
    print(f"mean of committed, user_values, switch: {mean_us:.2f} us")
    assert mean_us < 100  # about 2 on an idle machine
