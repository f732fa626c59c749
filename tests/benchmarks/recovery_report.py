"""What was measured, as a table: medians and maxima of every side, targets, ratios, and the stages of a recovery."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

OURS = "elastictrain"
STAGES = ("detect", "fence", "abort", "park", "agree", "rebuild", "sync", "rewind", "resume")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure: `case` and `value` name it in the results, `rival_case` where rivals have no such case."""

    case: str
    value: str
    text: str
    target: str = "-"
    rival_case: str = ""


def _node_rows(case: str, ttl: str) -> tuple[Row, ...]:
    where = {"case": case, "rival_case": "node"}
    return (
        Row(**where, value="next", text=f"node killed ({ttl}) -> next committed step"),
        Row(**where, value="known", text="... of which until its death is known"),
        Row(**where, value="after", text="... and from then on", target="0.15 median"),
        Row(**where, value="return_whole", text="the node comes back: command -> world whole"),
        Row(**where, value="return_gap", text="... the others' longest pause meanwhile"),
        Row(**where, value="return_change", text="... their pause when it enters", target="0.05"),
    )


def _visit_rows(case: str, what: str) -> tuple[Row, ...]:
    return (
        Row(case=case, value="join_whole", text=f"fresh node joins, {what}: command -> world whole"),
        Row(case=case, value="join_gap", text="... the others' longest pause meanwhile"),
        Row(case=case, value="join_change", text="... their pause when it enters", target="0.05"),
        Row(case=case, value="leave_gap", text=f"announced leave, {what}: the stayers' longest pause", target="0.1"),
    )


ROWS = (
    Row(case="worker", value="next", text="worker killed -> next committed step", target="0.15 median, 0.4 worst"),
    Row(case="worker", value="whole", text="... -> world whole again"),
    Row(case="worker-twice", value="pause", text="two workers killed, up to 0.1 s apart: the others' longest pause"),
    *_node_rows("node", "ttl 10 s"),
    *_node_rows("node-short", "ttl 2 s"),
    *_visit_rows("visits", "2 workers each"),
    *_visit_rows("visits-one", "1 worker each"),
    *_visit_rows("visits-200MB", "2 workers each, 200 MB of state"),
    Row(case="hang", value="next", text="worker stopped -> next committed step (2 s count as a hang)"),
    Row(case="partition", value="next", text="node cut off (ttl 10 s) -> next committed step of the others"),
    Row(case="partition", value="known", text="... of which until its lease has run out"),
    Row(case="partition", value="after", text="... and from then on", target="0.15 median"),
    Row(case="partition", value="heal_whole", text="the cut heals -> world whole"),
    Row(case="partition", value="heal_gap", text="... the others' longest pause meanwhile", target="0.05"),
)


@dataclass
class Outcome:
    """The tries of one case on one side: seconds by value, seconds by stage, and how often nothing went on."""

    tries: int = 0
    hung: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    stages: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, value: str, seconds: float | None) -> None:
        if seconds is not None:
            self.seconds.setdefault(value, []).append(seconds)

    def add_stages(self, event: str, stages: Mapping[str, float]) -> None:
        for stage, seconds in stages.items():
            self.stages.setdefault(event, {}).setdefault(stage, []).append(seconds)

    def to_json(self) -> dict[str, Any]:
        return {"tries": self.tries, "hung": self.hung, "seconds": self.seconds, "stages": self.stages}


Results = dict[str, dict[str, dict[str, Any]]]
"""Case -> side -> what `Outcome.to_json` gives."""


def table(results: Results, sides: list[str]) -> Iterator[str]:
    """The lines of a Markdown table: median / maximum (number) in seconds, and rivals over ours."""
    yield "| seconds: median / max (tries) | target | " + " | ".join(sides) + " |"
    yield "|---" * (2 + len(sides)) + "|"
    for row in ROWS:
        ours = _seconds(results, row, OURS)
        cells = []
        for side in sides:
            cells.append(_cell(results, row, side, ours))
        if any(cell != "-" for cell in cells):
            yield f"| {row.text} | {row.target} | " + " | ".join(cells) + " |"


def _found(results: Results, row: Row, side: str) -> Mapping[str, Any]:
    case = row.case if side == OURS else row.rival_case or row.case
    return results.get(case, {}).get(side, {})


def _seconds(results: Results, row: Row, side: str) -> list[float]:
    return list(_found(results, row, side).get("seconds", {}).get(row.value, []))


def _cell(results: Results, row: Row, side: str, ours: list[float]) -> str:
    seconds, outcome = _seconds(results, row, side), _found(results, row, side)
    words = []
    if seconds:
        words.append(f"{median(seconds):.3f} / {max(seconds):.3f} ({len(seconds)})")
        if side != OURS and ours and median(ours) > 0:
            ratio = median(seconds) / median(ours)
            words.append(f"x{ratio:.0f}" if ratio >= 10 else f"x{ratio:.2g}")
    if outcome.get("hung") and row.value in ("next", "join_whole"):
        words.append(f"hung {outcome['hung']} of {outcome['tries']}")
    return ", ".join(words) or "-"


def stage_table(results: Results) -> Iterator[str]:
    """Where the time of elastictrain's recoveries goes: the median of each stage, in milliseconds."""
    yield "| ms, median of each stage | " + " | ".join(STAGES) + " |"
    yield "|---" * (1 + len(STAGES)) + "|"
    for case, by_side in results.items():
        for event, stages in by_side.get(OURS, {}).get("stages", {}).items():
            cells = [f"{median(stages[stage]) * 1e3:.1f}" if stage in stages else "-" for stage in STAGES]
            yield f"| {case}: {event} | " + " | ".join(cells) + " |"
