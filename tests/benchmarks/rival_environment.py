"""An environment of its own for each rival, made with pip in a scratch folder and kept there for the next time."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGES = {"torchrun": ("torch==2.13.0", "numpy"), "torchft": ("torchft==0.2.0", "torch==2.13.0", "numpy")}


def make_environment(scratch: Path, name: str) -> Path:
    """The `bin` folder of an environment with the packages of `name`; blocks, about a minute the first time.

    Raises RuntimeError with pip's words when a package cannot be installed.
    """
    folder = scratch / f"env-{name}"
    ready = folder / "installed.txt"
    wanted = "\n".join(PACKAGES[name])
    if not ready.exists() or ready.read_text() != wanted:
        print(f"installing {' '.join(PACKAGES[name])} into {folder}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        words = [str(folder / "bin" / "pip"), "install", "-q", "--no-cache-dir", "-c", str(ROOT / "constraints.txt")]
        done = subprocess.run([*words, *PACKAGES[name]], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"pip could not install {wanted.split()}:\n{done.stderr}")
        ready.write_text(wanted)
    return folder / "bin"
