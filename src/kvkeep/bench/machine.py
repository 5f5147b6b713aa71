"""What figures depend on: the machine, the packages that took part, and the commit of this code."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

PACKAGES = ("numpy", "torch", "triton", "transformers", "sglang", "vllm")


def machine() -> dict[str, str | int]:
    """By name. A package's version is there once it has been imported, from wherever."""
    import torch

    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    found: dict[str, str | int] = {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages * page / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": commit(Path(__file__)),
    }
    if torch.cuda.is_available():
        driver = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        found["device"] = torch.cuda.get_device_name()
        found["driver"] = driver.partition("\n")[0] or "unknown"
    imported = {name: sys.modules[name] for name in PACKAGES if sys.modules.get(name)}
    return found | {name: module.__version__ for name, module in imported.items()}


def commit(file: Path) -> str:
    """Of the repository that tracks ``file``: a copy may lie in one that does not."""
    git = ("git", "-C", str(file.parent))
    tracked = _said(*git, "ls-files", "--error-unmatch", file.name)
    return (tracked and _said(*git, "describe", "--always", "--dirty=+changes")) or "unknown"


def _said(*command: str) -> str:
    """What a command prints; nothing where it fails, or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return ""
    return "" if done.returncode else done.stdout.strip()


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")
