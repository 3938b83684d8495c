"""Facts about the machine and the code behind a result, and the writer of result files."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
_PACKAGES = ("tensorflow-cpu", "tensorflow", "keras", "grpcio", "protobuf", "numpy")
#: Maximum load average per core before a run; a busier machine gives no reliable figures.
_BUSY_SHARE = 0.25
_SOURCES = (".", ":!bench/results")


def facts(packages: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the machine, versions, commit and load. Call it before the measurement starts.

    Args:
        packages: Name -> version of further packages to list, such as the peers' packages.
    """
    versions = {name: version for name in _PACKAGES if (version := _version(name))}
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cores": os.cpu_count(),
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "congestion_control": _read("/proc/sys/net/ipv4/tcp_congestion_control"),
        "versions": {**versions, **(packages or {})},
        **_commit(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def describe(found: Mapping[str, Any]) -> str:
    """Return the facts as Markdown lines."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    load = f"load before the start: {found['load_before']}"
    if found["load_before"] > _BUSY_SHARE * (found["cores"] or 1):
        load += " (**the machine was busy: these figures are no measurement**)"
    return "\n".join(
        [
            f"- {found['date']}, commit {commit(found)}",
            f"- {found['cores']} cores ({found['processor']}), {found['memory_gib']} GiB, "
            f"{found['system']}, TCP {found['congestion_control']}",
            f"- {versions}",
            f"- {load}",
        ]
    )


def commit(found: Mapping[str, Any]) -> str:
    """Return the commit, marked if the working tree has uncommitted changes."""
    return str(found["commit"]) + (" with uncommitted changes" if found["dirty"] else "")


def write(
    stem: str, found: Mapping[str, Any], tables: Mapping[str, str], folder: Path | None = None
) -> list[Path]:
    """Write each table to the file DATE-STEM.SUFFIX; return the paths.

    An existing file is overwritten.

    Args:
        stem: Name of the result.
        found: Facts from `facts`, which give the date.
        tables: Suffix of a file -> text of the file.
        folder: Folder to write to; None means `RESULTS`.
    """
    folder = folder or RESULTS
    folder.mkdir(exist_ok=True)
    paths = []
    for suffix, text in tables.items():
        path = folder / f"{found['date'][:10]}-{stem}.{suffix}"
        path.write_text(text)
        paths.append(path)
    return paths


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first row of `cells` is the table's head."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(cells[0]), *lines[1:]]) + "\n"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> dict[str, Any]:
    try:
        head = _git("rev-parse", "--short=12", "HEAD").strip()
        return {
            "commit": head,
            "dirty": bool(_git("status", "--porcelain", "--", *_SOURCES).strip()),
        }
    except (OSError, subprocess.CalledProcessError):  # no git, or an archive without a repository
        return {"commit": "unknown", "dirty": False}


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def _memory_gib() -> int:
    return round(int((_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / 2**20)


def _field(path: str, name: str) -> str | None:
    """Return the value of the first line "name : value" of a file."""
    for line in _read(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
