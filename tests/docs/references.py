"""Write the generated parts of docs/reference: `python tests/docs/references.py`. A test checks that they agree."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
INTERNAL = {"abandon", "before_update", "reduce", "forget_between"}  # for the package itself
COMMANDS = ("", "run", "resume", "status", "verify", "checkpoints")


def ledger_events() -> str:
    from elastictrain.ledger import EVENT_FIELDS

    rows = ["| event | fields |", "|---|---|"]
    for name, spec in EVENT_FIELDS.items():
        fields = [*spec.fields, *(f"{field} (optional)" for field in spec.optional)]
        rows.append(f"| `{name}` | {', '.join(fields) or 'none'} |")
    return "\n".join(rows)


def metrics() -> str:
    from elastictrain.metrics import METRICS

    rows = ["| name | type | labels | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{spec.name}` | {spec.kind} | {', '.join(spec.labels) or 'none'} | {spec.help} |"
        for spec in METRICS.values()
    ]
    return "\n".join(rows)


def cli() -> str:
    parts = []
    for command in COMMANDS:
        words = [command] if command else []
        shown = subprocess.run(
            [sys.executable, "-m", "elastictrain", *words, "--help"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "COLUMNS": "110"},
        ).stdout
        parts.append(f"## elastictrain {command}".rstrip() + f"\n\n```text\n{shown.rstrip()}\n```")
    return "\n\n".join(parts)


def api() -> str:
    import elastictrain

    parts = []
    for name in elastictrain.__all__:
        value = getattr(elastictrain, name)
        if inspect.isclass(value) and not issubclass(value, Exception):
            parts.append(f"## {name}\n\n{inspect.getdoc(value)}")
            for member, function in vars(value).items():
                if not member.startswith("_") and member not in INTERNAL and inspect.getdoc(function):
                    parts.append(f"### {name}.{_head(member, function)}\n\n{inspect.getdoc(function)}")
        elif inspect.isclass(value):
            parts.append(f"## {name}\n\n{inspect.getdoc(value)}")
        else:
            parts.append(f"## {_head(name, value)}\n\n{inspect.getdoc(value)}")
    return "\n\n".join(parts)


def _head(name: str, value: object) -> str:
    if isinstance(value, property):
        return name
    signature = inspect.signature(value)  # type: ignore[arg-type]
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    text = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return name + re.sub(r"'([^' ]+(?: \| [^' ]+)*)'(?=[,)= ])", r"\1", text)


GENERATED: dict[str, tuple[str, Callable[[], str]]] = {
    "ledger events": ("reference/ledger.md", ledger_events),
    "metrics": ("reference/metrics.md", metrics),
    "cli": ("reference/cli.md", cli),
    "api": ("reference/python-api.md", api),
}


def current(name: str) -> tuple[Path, str]:
    """The file that holds a generated part, and its whole text as it should be."""
    path, make = DOCS / GENERATED[name][0], GENERATED[name][1]
    start, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
    before, rest = path.read_text().split(start, 1)
    return path, f"{before}{start}{make()}\n{end}{rest.split(end, 1)[1]}"


if __name__ == "__main__":
    for part in GENERATED:
        target, text = current(part)
        target.write_text(text)
