"""What results files and certificates say of the machine and of the code that they are from."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

HEADER = ("gpu", "driver", "torch", "cutlass_dsl", "commit", "date")
NO_GPU = "none"
UNKNOWN = "unknown"
ROOT = Path(__file__).resolve().parent.parent  # of the repository, where this is a checkout


def version(*distributions: str) -> str:
    """Version of the first of them that is installed; empty when none is."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20, cwd=ROOT
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def driver() -> str:
    """Version of the GPU's driver, as nvidia-smi has it; empty without one."""
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0].strip() if found else ""


def commit() -> str:
    """KDA_CUTE_COMMIT, of a copy without its history; else of a checkout HEAD, with "-dirty" when
    tracked files differ, or "unknown"; else "release VERSION".
    """
    named = os.environ.get("KDA_CUTE_COMMIT")
    if named:
        return named
    # git would answer for any repository around an installed package.
    if not (ROOT / "pyproject.toml").is_file():
        return f"release {version('kda-cute') or UNKNOWN}"
    head = _output("git", "rev-parse", "--verify", "--quiet", "HEAD")
    if head is None:
        return UNKNOWN
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return f"{head}-dirty" if changed else head


def surroundings() -> dict[str, str]:
    """The head of a results file of this machine: HEADER, all of them words."""
    import torch

    values = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else NO_GPU,
        driver() or UNKNOWN,
        torch.__version__,
        version("nvidia-cutlass-dsl") or UNKNOWN,
        commit(),
        datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    return dict(zip(HEADER, values, strict=True))


def described(head: Mapping[str, str]) -> str:
    """A head in one line; its commit in 12 digits."""
    named, dash, dirty = head["commit"].partition("-")
    short = named if named.startswith("release ") else named[:12]
    return (
        f"{head['gpu']}, driver {head['driver']}, torch {head['torch']}, CuTe-DSL "
        f"{head['cutlass_dsl']}, commit {short}{dash}{dirty}, {head['date'][:10]}"
    )
