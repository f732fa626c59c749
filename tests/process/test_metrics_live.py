"""The metrics endpoint and `elastictrain status` while workers die, come back and finish."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from support_eval import EvalRun, kill, started
from waiting import wait_until

PERIOD_S = 0.2
KINDS = {"productive", "recovering", "checkpointing", "waiting", "starting", "idle"}
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def metrics_url(run: EvalRun) -> str:
    def read() -> str:
        for path in (run.run_dir / "agents").glob("[!.]*.json"):
            return str(json.loads(path.read_text())["metrics_url"])
        return ""

    return wait_until(read, 30, run.log)


@dataclass
class Scraper(threading.Thread):
    """Scrapes every PERIOD_S until told to stop; whatever goes wrong is an error of the test."""

    url: str
    scrapes: list[tuple[float, Series]] = field(default_factory=list)
    errors: list[tuple[float, str]] = field(default_factory=list)
    counters: set[str] = field(default_factory=set)
    is_over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__init__(name="scraper")

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        while not self.is_over.wait(PERIOD_S):
            try:
                self.scrape()
            except (OSError, ValueError) as error:
                self.errors.append((time.monotonic(), repr(error)))

    def scrape(self) -> None:
        with urllib.request.urlopen(self.url, timeout=1.0) as answer:
            text = answer.read().decode()
        series: Series = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if family.type in ("counter", "histogram", "summary") and not sample.name.endswith("_created"):
                    self.counters.add(sample.name)
                key = sample.name, tuple(sorted(sample.labels.items()))
                assert key not in series, f"{key} twice in one scrape"
                series[key] = sample.value
        self.scrapes.append((time.monotonic(), series))


def ranks_in(series: Series) -> set[str]:
    return {value for _, labels in series for name, value in labels if name == "rank"}


def value(series: Series, name: str, **labels: str) -> float:
    (found,) = [v for (n, have), v in series.items() if n == name and labels.items() <= dict(have).items()]
    return found


def assert_monotone(scraper: Scraper) -> None:
    last: Series = {}
    for _, series in scraper.scrapes:
        for key, now in series.items():
            if key[0] in scraper.counters:
                assert now >= last.get(key, 0.0), f"{key} went back from {last[key]} to {now}"
                last[key] = now


def status(run: EvalRun) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "elastictrain", "status", str(run.run_dir)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_metrics_stay_right_when_a_worker_is_killed_replaced_and_the_run_finishes(tmp_path: Path) -> None:
    """Counters never go back, a dead rank's series vanish, and the kinds of time add up to what has passed."""
    with started(tmp_path, "--epochs", "24", "--pause-s", "0.04", options=("--spares", "0")) as run:
        scraper = Scraper(metrics_url(run))
        scraper.start()
        try:
            run.wait_step(20)
            during = status(run)
            victim = dict(run.world())[1]
            kill(victim)
            killed_s = time.monotonic()
            wait_until(lambda: len(run.ledger("round")) >= 3, 20, run.log)
            run.wait_step(len(run.ledger("commit")) + 30)
            kill(dict(run.world())[2])
            run.wait_step(len(run.ledger("commit")) + 20)
            at_s, (scrape_s, series) = time.monotonic(), scraper.scrapes[-1]
            assert at_s - scrape_s < 1.5
            assert run.wait() == 0
        finally:
            scraper.is_over.set()
            scraper.join()
    # The endpoint ends a moment before its process does: only what comes after the last answer may fail.
    assert all(when_s > scraper.scrapes[-1][0] and "refused" in what for when_s, what in scraper.errors), scraper.errors
    assert len(scraper.scrapes) > 30
    assert_monotone(scraper)
    assert value(series, "elastictrain_world_size") == 3
    assert value(series, "elastictrain_worker_restarts_total") == 2
    assert value(series, "elastictrain_recoveries_total", cause="worker_lost") == 2
    assert {dict(labels)["kind"] for name, labels in series if name == "elastictrain_time_seconds_total"} == KINDS
    for when_s, one in scraper.scrapes:
        expected = {"0", "1", "2"}
        assert ranks_in(one) <= expected
        if one.get(("elastictrain_world_size", (("run", run_id(one)),))) == 2 and when_s > killed_s + 2:
            assert ranks_in(one) == {"0", "1"}
    assert len({(name, labels) for _, one in scraper.scrapes for name, labels in one}) < 600
    assert_time_adds_up(scraper)
    assert "running" in during
    assert "3" in during
    after = status(run)
    assert "finished" in after
    assert str(run.final()["step"]) in after


def run_id(series: Series) -> str:
    return next(value for _, labels in series for name, value in labels if name == "run")


def assert_time_adds_up(scraper: Scraper) -> None:
    """Between two scrapes of a whole world the kinds grow by three workers' seconds, replacements included."""
    whole = [(s, one) for s, one in scraper.scrapes if ranks_in(one) == {"0", "1", "2"}]
    (first_s, first), (last_s, last) = whole[0], whole[-1]

    def total(series: Series) -> float:
        return sum(v for (name, _), v in series.items() if name == "elastictrain_time_seconds_total")

    grown, passed = total(last) - total(first), last_s - first_s
    assert 0.9 * 3 * passed - 1 < grown < 3 * passed + 1, (grown, passed)
