"""Every example and the program of the README run, and do what they say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import Job, environment, start, verify

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"


def run_example(tmp_path: Path, name: str, *args: str, nproc: int = 2, options: tuple[str, ...] = ()) -> Job:
    command = ["run", "--nproc-per-node", str(nproc), "--run-dir", "{run_dir}", *options, str(EXAMPLES / name), *args]
    job = start(tmp_path, command)
    assert job.wait() == 0, job.output()
    return job


def run_python(tmp_path: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=environment(PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_readme_job_recovers_and_is_proved(tmp_path: Path) -> None:
    """The demonstration of the README, word for word, in a folder of its own."""
    block = re.search(r"<!-- command: demo -->\n```bash\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    (line,) = [line for line in block[1].splitlines() if line.startswith("elastictrain run")]
    words = shlex.split(line.removesuffix("&&"))[1:]
    words[words.index("--run-dir") + 1] = "{run_dir}"
    words = [str(ROOT / word) if word.startswith("docs/") else word for word in words]
    job = start(tmp_path, words)
    assert job.wait() == 0, job.output()
    assert [entry["world_size"] for entry in job.find("round")] == [2, 1, 2]
    assert verify(job.run_dir).returncode == 0
    assert len({entry["pid"] for entry in job.find("worker_started")}) == 3
    assert re.search(r"recovered from worker_lost in \d", job.output())
    results = [entry["result"] for entry in job.find("evaluated")]
    assert len(results) == 10
    assert results[-1] > 850, "it learns to read digits"


def test_plain_ddp_example_starts_again_when_a_worker_is_killed(tmp_path: Path) -> None:
    saved = tmp_path / "plain.pt"
    args = ("--epochs", "3", "--checkpoint", str(saved), "--kill-rank", "1", "--kill-step", "50")
    job = run_example(tmp_path, "mnist_plain_ddp.py", *args)
    assert torch.load(saved, weights_only=True)["epochs_done"] == 3
    assert "restarting all workers" in job.output()


def test_char_transformer_learns(tmp_path: Path) -> None:
    job = run_example(tmp_path, "char_transformer.py", "--steps", "60", "--batch-size", "16", "--width", "32")
    losses = [entry["values"]["loss"] for entry in job.find("user_values")]
    assert losses[-1] < losses[0] - 0.5
    assert verify(job.run_dir).returncode == 0


def test_spawn_style_example_runs_through_launch(tmp_path: Path) -> None:
    shown = run_python(
        tmp_path, str(EXAMPLES / "convnet_spawn.py"), "--epochs", "1", "--run-dir", str(tmp_path / "run")
    )
    assert "epoch 0: loss" in shown
    assert "2 workers" in shown


def test_data_parallel_weights_load_in_plain_and_ddp_scripts(tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    run_example(tmp_path, "data_parallel.py", "--epochs", "1", "--save-to", str(weights), nproc=1)
    assert not any(name.startswith("module.") for name in torch.load(weights, weights_only=True))
    shown = run_python(tmp_path, str(EXAMPLES / "data_parallel.py"), "--load", str(weights))
    plain, wrapped = (line.split(": ")[1] for line in shown.splitlines() if line.startswith(("plain", "DDP")))
    assert plain == wrapped


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_python_blocks_run_when_they_are_whole_programs(tmp_path: Path, page: Path) -> None:
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)):
        compile(block, f"{page.name}:{number}", "exec")
        if "import" in block and "elastictrain.init()" in block:
            script = tmp_path / f"block{number}.py"
            script.write_text(block)
            job = start(
                tmp_path, ["run", "--nproc-per-node", "2", "--run-dir", "{run_dir}", str(script)], name=f"b{number}"
            )
            assert job.wait() == 0, job.output()
