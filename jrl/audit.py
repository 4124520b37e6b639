"""audit.jsonl: what happened to a run, a line each: with which config, code, packages and devices it was started, restarted and
rolled back, which checkpoints it wrote, and how it ended.
"""

import importlib.metadata
import json
import pathlib
import socket
import subprocess
import sys
import time
from typing import Any

import jax

import jrl

FILE = "audit.jsonl"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers", "safetensors", "libtpu")


class Audit:
    """Appends to a run's file; nothing in it is ever changed or dropped."""

    def __init__(self, run_dir: pathlib.Path):
        self._file = run_dir / FILE

    def note(self, event: str, **facts: Any) -> None:
        """One line, on disk when this returns."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with self._file.open("a") as file:
            file.write(json.dumps({"time": now, "event": event, **facts}) + "\n")


def surroundings() -> dict[str, Any]:
    """Code, packages, hosts and devices, as this process finds them."""
    kinds: dict[str, int] = {}
    for device in jax.devices():
        kinds[device.device_kind] = kinds.get(device.device_kind, 0) + 1
    return {
        "command": sys.argv,
        "host": socket.gethostname(),
        "python": sys.version.split()[0],
        "jrl": jrl.__version__,
        "revision": _revision(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "processes": jax.process_count(),
        "devices": kinds,
        "device_ids": [device.id for device in jax.devices()],
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _revision() -> str | None:
    """The commit of jrl's source where that is a git checkout, with "+changes" where files differ from it; otherwise None."""
    root = pathlib.Path(jrl.__file__).parent
    try:
        describe = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty=+changes", "--exclude=*"]
        return subprocess.run(describe, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
