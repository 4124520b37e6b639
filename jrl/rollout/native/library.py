"""The kernels as a library: compiled by the machine's C++ compiler when they are first needed, and kept on disk.

The compiler is told to use all that this processor can do, so what is kept has a name that holds for this processor alone.
"""

import ctypes
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile

import jax

from jrl.platform import cache_dir

SOURCE = pathlib.Path(__file__).with_name("kernels.cc")
SOURCES = sorted((SOURCE, *SOURCE.parent.glob("*.h")))
TARGETS = ("jrl_product", "jrl_pack", "jrl_attend", "jrl_sample")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-w")
TIMEOUT_S = 300


class Unavailable(Exception):
    """The kernels cannot be had here; the text says why."""


@functools.cache
def panel() -> int:
    """Columns of a panel of packed weights. The kernels are compiled, loaded and made known to JAX by the first call.

    Raises:
      Unavailable: no compiler, or it does not compile them.
    """
    library = ctypes.CDLL(str(_compiled()))
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return int(library.jrl_panel())


@functools.cache
def reason_against() -> str:
    """Why the kernels cannot be had here; empty where they can."""
    try:
        panel()
    except Unavailable as error:
        return str(error)
    return ""


def _compiled() -> pathlib.Path:
    compiler = _compiler()
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    command = [*compiler, *FLAGS, native, "-isystem", jax.ffi.include_dir(), str(SOURCE)]
    made_of = [*command, importlib.metadata.version("jaxlib"), _processor(), *(source.read_text() for source in SOURCES)]
    key = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]
    kept = cache_dir() / "native" / f"kernels-{key}.so"
    if kept.exists():
        return kept
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as there:  # another process may be at it, too
            made = pathlib.Path(there) / kept.name
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, timeout=TIMEOUT_S)
            if done.returncode:
                raise Unavailable(f"{compiler[0]} does not compile its kernels: {_first_error(done.stderr)}")
            os.replace(made, kept)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{compiler[0]} does not compile its kernels: {error}") from None
    return kept


def _compiler() -> list[str]:
    named = os.environ.get("CXX", "").split()
    for command in (named, ["c++"], ["g++"], ["clang++"]):
        if command and shutil.which(command[0]):
            return command
    raise Unavailable("its kernels need a C++ compiler, c++ or what CXX names, and there is none")


def _first_error(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines()[-1:] or ["no message"]
    return lines[0][:200]


def _processor() -> str:
    """What tells this kind of processor from others with which a home directory may be shared."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in text.splitlines() if line.startswith(("flags", "model name", "Features"))}))
