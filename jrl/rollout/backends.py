"""Attention backends of the rollout engine: what they have in common, and which one a machine gets, with the reasons.

A backend owns the layout of the KV pool. To everybody else the pool is an opaque pytree that is made from `pool_arrays`,
donated to every compiled program and handed back by it.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jrl.errors import UserError
from jrl.models import decoder
from jrl.models.arch import Arch
from jrl.models.decoder import MASTER_DTYPE, QUANTIZED_DTYPE, Attend
from jrl.models.unstack import unstack_layers
from jrl.rollout import paged_attention, sampler
from jrl.rollout.native import library
from jrl.sharding.layout import Axes, Layout

log = logging.getLogger("jrl")


class PoolArray(NamedTuple):
    """One array of a KV pool, filled with zeros at first."""

    shape: tuple[int, ...]
    axes: Axes  # logical, for `Layout.sharding`
    dtype: Any


class Backend(Protocol):
    """Writes keys and values to pages and attends over them; letters as in `jrl.rollout.paged_attention`.

    Page ids are those of a replica's pool; a page holds its tokens in every layer, and page 0 is the null page.
    """

    name: str

    @property
    def row_pages(self) -> int | None:
        """The most pages of a row of the decode call's `Table`; None for one row a slot."""

    def pool_arrays(self, num_pages: int, page_size: int) -> dict[str, PoolArray]:
        """The arrays of the pool, with padding where the backend pads: the truth about its bytes."""

    def decode_attend(
        self, table: paged_attention.Table, lens: jax.Array, active: jax.Array, num_pages: int, page_size: int, tokens: int = 1
    ) -> Attend:
        """The `attend` of `tokens` new tokens per slot, to be called within a layer of `jrl.models.decoder.forward`.

        Args:
          table: the pages of the slots' tokens, shared and own.
          lens: i32[R, B] tokens already in the cache; the new ones, slot after slot, are written from this position on, those
            that a slot has no page for to the null page.
          active: bool[R, B]; idle slots write to the null page, and their output has no meaning, but is finite.
        """

    def prefill_attend(
        self, table: jax.Array, prior: jax.Array, start: jax.Array, lens: jax.Array, num_pages: int, page_size: int
    ) -> Attend:
        """The `attend` of the next tokens of prompts, causal, over them and over what is cached before.

        Args:
          table: i32[R, P, t / page_size] pages of the new tokens, 0 where a prompt has none.
          prior: i32[R, P, W] pages before them; W is 0 where no prompt has any.
          start: i32[R, P] tokens cached before, whole pages.
          lens: i32[R, P] new tokens of each prompt, 0 only after the last prompt that has some; output beyond is of no
            meaning, but finite.
        """

    def copy_pages(self, pool: Any, source: jax.Array, target: jax.Array, num_layers: int, num_pages: int) -> Any:
        """Copies page `source[r, c]` to page `target[r, c]` in every layer; both i32[R, C], the pair (0, 0) does nothing."""

    def decode_params(self, params: Any, unroll: bool) -> Any:
        """What decoding reads in place of the parameters that were loaded.

        Args:
          unroll: without a scan over layers, where that makes a difference (`jrl.models.unstack`).
        """

    def packed_bytes(self) -> int:
        """What `decode_params` takes besides the parameters that were loaded, in their own precision."""

    def logits(
        self, params: Any, tokens: jax.Array, positions: jax.Array, attend: Attend, pool: Any, busy: jax.Array
    ) -> tuple[jax.Array, Any]:
        """f32[R, M, V] after each of the slots' new tokens i32[R, M], and the pool.

        Args:
          params: of `decode_params`.
          positions: i32[R, M].
          attend: of `decode_attend`.
          busy: bool[R, M]; what is made of other tokens has no meaning, but is finite.
        """

    def sample(
        self, logits: jax.Array, temperature: jax.Array, uniform: jax.Array, busy: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """As `jrl.rollout.sampler.sample`; what is made of tokens that are not busy has no meaning."""


class DecoderSteps:
    """What backends have in common that decode by `jrl.models.decoder`, from the weights as they were loaded."""

    arch: Arch
    layout: Layout
    dtype: Any

    def decode_params(self, params: Any, unroll: bool) -> Any:
        return unstack_layers(params) if unroll else params

    def packed_bytes(self) -> int:
        return 0

    def logits(
        self, params: Any, tokens: jax.Array, positions: jax.Array, attend: Attend, pool: Any, busy: jax.Array
    ) -> tuple[jax.Array, Any]:
        del busy
        constrain = self.layout.constrain
        hidden, pool = decoder.forward(
            self.arch, params, tokens, positions, attend, pool, dtype=self.dtype, constrain=constrain
        )  # fmt: skip
        return constrain(decoder.logits(self.arch, params, hidden), ("batch", "slots", "act_vocab")), pool

    def sample(
        self, logits: jax.Array, temperature: jax.Array, uniform: jax.Array, busy: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del busy
        return sampler.sample(logits, temperature, uniform)


class XlaBackend(DecoderSteps):
    """`jrl.rollout.paged_attention`: plain XLA, for every platform.

    Where the mesh has several times as many devices along the query heads as there are KV heads, the pool holds each KV head
    that many times, so that every device stores and reads the one that its query heads want and no other.
    """

    name = "xla"
    row_pages: int | None = paged_attention.ROW_PAGES

    def __init__(self, arch: Arch, layout: Layout, dtype: Any, kv: str = "same"):
        self.arch, self.layout, self.dtype, self.kv = arch, layout, dtype, kv
        copies, rest = divmod(layout.shards("act_heads"), arch.num_kv_heads)
        self.copies = 1 if rest else max(copies, 1)

    def pool_arrays(self, num_pages: int, page_size: int) -> dict[str, PoolArray]:
        kv_heads = self.arch.num_kv_heads * self.copies
        rows = self.arch.num_layers * num_pages
        shape, axes = (self.layout.batch_shards, rows, kv_heads, page_size, self.arch.head_dim), paged_attention.POOL_AXES
        if self.kv == "same":
            return dict.fromkeys(("k", "v"), PoolArray(shape, axes, self.dtype))
        scales = dict.fromkeys(("k_scale", "v_scale"), PoolArray(shape[:-1], axes[:-1], MASTER_DTYPE))
        return dict.fromkeys(("k", "v"), PoolArray(shape, axes, QUANTIZED_DTYPE)) | scales

    def decode_attend(
        self, table: paged_attention.Table, lens: jax.Array, active: jax.Array, num_pages: int, page_size: int, tokens: int = 1
    ) -> Attend:
        make_read = self.make_read
        return self._copied(paged_attention.decode_attend(make_read, table, lens, active, num_pages, page_size, tokens))

    def prefill_attend(
        self, table: jax.Array, prior: jax.Array, start: jax.Array, lens: jax.Array, num_pages: int, page_size: int
    ) -> Attend:
        return self._copied(paged_attention.prefill_attend(table, prior, start, lens, num_pages, page_size))

    def make_read(self, pages: jax.Array, limit: jax.Array, tokens: int, page_size: int) -> paged_attention.Read:
        """How decoding reads pages; arguments as in `jrl.rollout.paged_attention.gathered`."""
        return paged_attention.gathered(pages, limit, tokens, page_size)

    copy_pages = staticmethod(paged_attention.copy_pages)

    def _copied(self, attend: Attend) -> Attend:
        if self.copies == 1:
            return attend
        split = ("batch", "length", "act_kv_heads", None)

        def copied(layer, q, k, v, pool):
            k, v = (self.layout.constrain(jnp.repeat(x, self.copies, axis=2), split) for x in (k, v))
            return attend(layer, q, k, v, pool)

        return copied


def _xla(arch: Arch, layout: Layout, dtype: Any, kv: str, platform: str) -> Backend:
    del platform
    return XlaBackend(arch, layout, dtype, kv)


def _tpu(arch: Arch, layout: Layout, dtype: Any, kv: str, platform: str) -> Backend:
    if platform != "tpu":
        raise UserError(f"attention backend 'tpu': its kernel runs on TPUs, and this is {platform}; choose 'xla' or 'auto'")
    if kv != "same":
        raise UserError(f"attention backend 'tpu': kv={kv!r} is beyond its kernel; choose 'xla', 'auto' or kv='same'")
    from jrl.rollout.tpu_attention import TpuBackend  # the kernel's packages take a second to import

    return TpuBackend(arch, layout, dtype)


def _gpu(arch: Arch, layout: Layout, dtype: Any, kv: str, platform: str) -> Backend:
    if platform != "gpu":
        raise UserError(f"attention backend 'gpu': its kernel is for NVIDIA GPUs, and this is {platform}; choose 'xla' or 'auto'")
    if kv != "same":
        raise UserError(f"attention backend 'gpu': kv={kv!r} is beyond its kernel; choose 'xla', 'auto' or kv='same'")
    if isinstance(layout.mesh, jax.sharding.Mesh):  # a plan has no devices
        kind = str(getattr(layout.mesh.devices.flat[0], "compute_capability", "of another maker"))
        if not kind.startswith("9."):
            raise UserError(f"attention backend 'gpu': its kernel is for Hopper GPUs (9.0), and this one is {kind}; choose 'xla'")
    from jrl.rollout.gpu_attention import GpuBackend  # as above

    log.warning("attention backend 'gpu': has not been measured on a GPU; compare its speed and logprobs with 'xla'")
    return GpuBackend(arch, layout, dtype)


def _cpu(arch: Arch, layout: Layout, dtype: Any, kv: str, platform: str) -> Backend:
    name = "attention backend 'cpu'"
    if platform != "cpu":
        raise UserError(f"{name}: its kernels run on CPUs, and this is {platform}; choose 'xla' or 'auto'")
    if kv != "same":
        raise UserError(f"{name}: kv={kv!r} is beyond its kernels; choose 'xla', 'auto' or kv='same'")
    if jnp.dtype(dtype) != MASTER_DTYPE:
        raise UserError(f"{name}: dtype {jnp.dtype(dtype).name} is not supported; use float32, 'xla' or 'auto'")
    if layout.mesh.size > 1:
        raise UserError(
            f"{name}: its kernels serve one device, and the rollout mesh has {layout.mesh.size}; choose 'xla' or 'auto'"
        )
    if reason := library.reason_against():
        raise UserError(f"{name}: {reason}; choose 'xla' or 'auto'")
    from jrl.rollout.cpu_backend import CpuBackend  # which is made of this module's

    return CpuBackend(arch, layout, dtype)


# By preference. Each makes the backend or raises a UserError that says why it cannot.
BACKENDS: dict[str, Callable[[Arch, Layout, Any, str, str], Backend]] = {"tpu": _tpu, "gpu": _gpu, "cpu": _cpu, "xla": _xla}
BY_NAME_ONLY = {"gpu": "it has not been measured on a GPU; it is there to be asked for by name"}


def choose_backend(
    name: str, platform: str, arch: Arch, layout: Layout, dtype: Any, kv: str = "same"
) -> tuple[Backend, list[tuple[str, str]]]:
    """The attention backend for a platform.

    Args:
      name: a backend's name, or "auto": the first that has been measured and can run, specialised ones before general ones.
      platform: of the rollout mesh's devices: "cpu", "gpu" or "tpu".
      kv: what the pool holds, "same" for numbers of `dtype` or "int8".

    Returns:
      the backend, and for every other one (name, why it was not chosen), for the log.

    Raises:
      UserError: an unknown name; a backend asked for by name that cannot run here.
    """
    if name != "auto":
        if name not in BACKENDS:
            raise UserError(f"attention backend {name!r} does not exist; choose auto, {', '.join(BACKENDS)}")
        return BACKENDS[name](arch, layout, dtype, kv, platform), [(n, f"{name!r} was asked for") for n in BACKENDS if n != name]
    chosen, reasons = None, []
    for other, make in BACKENDS.items():
        if chosen is not None:
            reasons.append((other, f"{chosen.name!r} can run and is preferred on {platform}"))
            continue
        if other in BY_NAME_ONLY:
            reasons.append((other, BY_NAME_ONLY[other]))
            continue
        try:
            chosen = make(arch, layout, dtype, kv, platform)
        except UserError as error:
            reasons.append((other, str(error)))
    assert chosen is not None, "xla can always run"
    return chosen, reasons
