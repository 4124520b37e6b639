"""What depends on the machine: the dtype of computation, and process-wide settings that make a run quick.

The settings are made when a run is put together, never by importing jrl.
"""

import ctypes
import os
import pathlib
import platform

import jax
import numpy as np

# glibc's mallopt parameters (malloc.h)
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def configure() -> None:
    """Keeps compiled programs on disk for the next run, and on CPU keeps freed memory in the process.

    XLA's CPU client takes the temporaries of every call from malloc. By default glibc maps such large blocks anew each time,
    and the first touch of fresh pages costs more than the arithmetic done in them; so blocks come from the heap and stay there.
    """
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    if platform.libc_ver()[0] == "glibc" and jax.default_backend() == "cpu":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_TOP_PAD, 64 << 20)


def cache_dir() -> pathlib.Path:
    """Where what was compiled is kept for the next run."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "jrl"


def compute_dtype(name: str, backend: str | None = None) -> np.dtype:
    """The dtype of a name; "auto" is float32 on CPU, where bfloat16 is emulated, and bfloat16 on accelerators.

    Args:
      backend: "cpu", "gpu" or "tpu"; by default this machine's.
    """
    if name == "auto":
        name = "float32" if (backend or jax.default_backend()) == "cpu" else "bfloat16"
    return jax.numpy.dtype(name)
