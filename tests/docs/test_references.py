"""The documentation agrees with the code and with itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from references import DOCS, GENERATED, current

ROOT = DOCS.parent
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("part", GENERATED)
def test_generated_reference_is_current(part: str) -> None:
    path, text = current(part)
    assert path.read_text() == text, "run `python tests/docs/references.py`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_named_tests_exist() -> None:
    text = (DOCS / "explanation" / "guarantees.md").read_text() + (ROOT / "README.md").read_text()
    names = re.findall(r"`((?:tests/[\w/]+/)?test_\w+\.py|tests/benchmarks/\w+\.py)`", text)
    assert names
    for name in names:
        assert (ROOT / name).exists() or list((ROOT / "tests").rglob(name)), name


def test_stage_names_are_those_of_the_code() -> None:
    from elastictrain.ledger import RECOVERY_STAGES, STEP_STAGES

    failure = (DOCS / "explanation" / "life-of-a-failure.md").read_text()
    assert re.findall(r"^\d\. \*\*(\w+)\.\*\*", failure, re.MULTILINE) == list(RECOVERY_STAGES)
    step = (DOCS / "explanation" / "life-of-a-step.md").read_text()
    assert re.findall(r"^\| \*\*(\w+)\*\*", step, re.MULTILINE) == list(STEP_STAGES)
