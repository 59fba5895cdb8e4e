"""Output that measurements share: where they ran, how a table prints, how a run ends."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

import numpy as np

_ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("numpy", "torch", "ray", "transformers", "msgspec", "pyzmq", "xxhash")


def environment() -> dict[str, object]:
    """Machine, versions, commit and command of this run, ready for JSON.

    Packages that aren't installed are left out of ``versions``. ``commit`` is None outside a
    git checkout or before the first commit; so is ``dirty``.
    """
    commit = _git("rev-parse", "--verify", "--quiet", "HEAD")
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "cpu": _cpu_model(),
        "cores": _usable_cores(),
        "load_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": _package_versions(PACKAGES),
        "commit": commit or None,
        "dirty": None if not commit or status is None else bool(status),
        "command": _command_line(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def print_table(headers: list[str], rows: list[list[object]]) -> None:
    """Print an aligned table: text columns to the left, columns of numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [
        max([len(header)] + [len(row[column]) for row in cells])
        for column, header in enumerate(headers)
    ]
    numeric = [
        bool(rows) and all(isinstance(row[column], int | float | None) for row in rows)
        for column in range(len(headers))
    ]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()

    print(line(headers))
    print("  ".join("-" * width for width in widths))
    for row in cells:
        print(line(row))
    sys.stdout.flush()


def finish(figures: dict[str, object], ok: bool) -> None:
    """End a run: print one line of JSON with the environment, the figures and ``ok``."""
    print(json.dumps({**figures, "environment": environment(), "ok": bool(ok)}, default=_plain))
    sys.stdout.flush()


def save_result(path: Path, figures: dict[str, object], ok: bool) -> None:
    """Write a run's figures with the environment to a JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = {**figures, "environment": environment(), "ok": bool(ok)}
    path.write_text(json.dumps(saved, indent=1, default=_plain) + "\n")


def percentiles(values: Iterable[float], qs: Sequence[float] = (50, 90, 99)) -> dict[str, float]:
    """``{"mean", "p50", "p90", "p99"}`` (or the given qs) of values, in the values' unit.

    An empty input gives an empty dict: there's no honest number to print.
    """
    array = np.asarray(list(values), dtype=np.float64)
    if array.size == 0:
        return {}
    points = np.percentile(array, qs)
    result = {"mean": float(array.mean())}
    result.update({f"p{q:g}": float(point) for q, point in zip(qs, points, strict=True)})
    return result


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            return str(value)
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _plain(value: object) -> object:
    """Turn numpy scalars and arrays into JSON; anything else is the caller's mistake."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} can't be written as JSON")


def _package_versions(names: Iterable[str]) -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _usable_cores() -> int | None:
    """Cores this process may run on, which in a container can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _command_line() -> str:
    """The command with the script relative to the repository, so that no home folder shows."""
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(_ROOT)) if script.is_relative_to(_ROOT) else script.name
    return shlex.join(["python", name, *sys.argv[1:]])


def _git(*arguments: str) -> str | None:
    """Output of a git command in the repository; None where git or the checkout is missing."""
    if not (_ROOT / ".git").exists():  # installed, perhaps inside another project's checkout
        return None
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=_ROOT, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
