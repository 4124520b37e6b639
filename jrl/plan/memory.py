"""Bytes on each device: what a run holds, and what each phase of a step needs besides."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jrl.models import decoder
from jrl.models.arch import Arch
from jrl.models.attention import QUERY_CHUNK
from jrl.plan.sizes import learner_shapes, prefill_sizes
from jrl.rollout.backends import Backend
from jrl.rollout.weights import int8_arrays
from jrl.sharding.layout import Layout
from jrl.sharding.memory_kinds import DEVICE, HOST

MASTER_BYTES = 4  # parameters, gradients, moments: float32
ADAM_MOMENTS = 2


def weight_shards(arch: Arch, layout: Layout, model: Any = decoder.Decoder) -> list[tuple[tuple[int, ...], Any]]:
    """(shape on one device, partition) of every weight."""
    shapes = jax.tree.leaves(decoder.abstract_params(arch, model))
    shardings = jax.tree.leaves(layout.tree(decoder.param_axes(arch, model), decoder.abstract_params(arch, model)))
    return [(s.shard_shape(x.shape), s.spec) for x, s in zip(shapes, shardings, strict=True)]


def count(weights: list[tuple[tuple[int, ...], Any]]) -> int:
    return sum(math.prod(shape) for shape, _ in weights)


def held_bytes(config, arch: Arch, layouts, weights, batch, backend: Backend, dtype) -> dict[str, dict[str, int]]:
    """What is held all the time, by the memory that holds it: the device's own, or its part of the host's."""
    held: dict[str, int] = {}
    far: dict[str, int] = {}
    for name in ("learner", "critic"):
        if name in weights:
            label = "policy" if name == "learner" else name
            held[f"{label}: parameters, float32"] = count(weights[name]) * MASTER_BYTES
            moments = far if config[name].optimizer_memory == HOST else held
            moments[f"{label}: Adam's moments, float32"] = count(weights[name]) * MASTER_BYTES * ADAM_MOMENTS
    if "reference" in weights:
        parameters = far if config.reference.memory == HOST else held
        parameters["reference: parameters, float32"] = count(weights["reference"]) * MASTER_BYTES
    if "reward" in weights:
        held["reward model: parameters, float32"] = count(weights["reward"]) * MASTER_BYTES
    if config.rollout.workers:
        return {DEVICE: held, HOST: far}
    rollout = layouts["rollout"]
    pool = backend.pool_arrays(batch["num_pages"], batch["page_size"]).values()
    shards = (math.prod(rollout.sharding(x.axes, x.shape).shard_shape(x.shape)) * jnp.dtype(x.dtype).itemsize for x in pool)
    kind = dtype.name if config.rollout.kv == "same" else config.rollout.kv
    held[f"rollout: KV pool, {kind}, at most"] = sum(shards)
    if config.max_staleness:
        held |= {f"rollout: {name}": n for name, n in _rollout_weights(config, arch, rollout, weights, backend, dtype).items()}
    return {DEVICE: held, HOST: far}


def phase_bytes(config, arch: Arch, layouts, weights, batch, backend: Backend, dtype) -> dict[str, dict[str, int]]:
    """The rollout's weights are let go before the updates and made anew after them, unless both go on side by side."""
    rollout = {} if config.max_staleness else _rollout_weights(config, arch, layouts["rollout"], weights, backend, dtype)
    tensor = layouts["rollout"].mesh.shape["tensor"]
    tokens = batch["slots"] * (config.rollout.speculate + 1)  # of a pass of decoding
    decode_logits = tokens * arch.vocab_size // tensor * 4 * 2  # logits and their probabilities, float32
    keys = batch["slots"] * (batch["prompt_tokens"] + batch["response_tokens"])
    gathered = keys * _kv_size(arch, tensor) * (dtype.itemsize + (config.rollout.kv == "int8"))  # as they lie, and as read
    # The head as it is multiplied with: on CPU XLA converts all of it first.
    head = arch.vocab_size * arch.hidden_size // tensor * dtype.itemsize * (config.rollout.weights == "int8")
    work = max(_prefill_work(arch, batch, tensor, dtype), decode_logits + gathered + head)
    phases = {} if config.rollout.workers else {"generating": {**rollout, "work arrays, estimate": work}}
    for name in ("learner", "critic"):
        if name in weights:
            sums = count(weights[name]) * MASTER_BYTES
            phases[f"updating the {'policy' if name == 'learner' else name}"] = {
                "gradients, sum of microbatches": sums,
                "a microbatch at work, estimate": update_work(
                    config,
                    arch,
                    layouts[name],
                    learner_shapes(batch, batch["minibatch_sequences"], layouts[name]),
                    dtype,
                    name == "learner",
                ),  # fmt: skip
            }
    return phases


def _rollout_weights(config, arch: Arch, layout: Layout, weights, backend: Backend, dtype) -> dict[str, int]:
    """What the rollout's copies take: none where dtype and placement are the policy's, all of it where it is quantized."""
    if config.rollout.weights == "int8":
        pairs = zip(*map(jax.tree.leaves, int8_arrays(arch, layout, dtype)), strict=True)
        return {"rollout weights, int8": sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in pairs)}
    copies = config.max_staleness or config.pools.rollout or dtype.itemsize != MASTER_BYTES
    copied = sum(
        math.prod(shape)
        for (shape, spec), (train_shape, train_spec) in zip(weights["rollout"], weights["learner"], strict=True)
        if copies or not _same_placement(spec, train_spec, shape, train_shape)
    )
    label = f"rollout weights, {dtype.name}" if copied else "rollout weights, the policy's own"
    packed = backend.packed_bytes()
    return {label: copied * dtype.itemsize} | ({"rollout weights, packed": packed} if packed else {})


def _same_placement(spec: Any, train_spec: Any, shape: tuple[int, ...], train_shape: tuple[int, ...]) -> bool:
    """Tensor groups are the innermost devices of both meshes, so equal splits over them are the same bytes in place."""
    return shape == train_shape and spec == train_spec


def _kv_size(arch: Arch, tensor: int) -> int:
    whole = arch.num_kv_heads % tensor  # then they are not split
    return 2 * arch.num_kv_heads * arch.head_dim // (1 if whole else tensor)


def _matmul_outputs(arch: Arch, tensor: int) -> int:
    """Numbers per token that the matrix products of one layer put out."""
    split = (arch.num_heads * arch.head_dim + 2 * arch.intermediate_size) // tensor
    return split + _kv_size(arch, tensor) + 2 * arch.hidden_size


def _layer_work(arch: Arch, tokens: int, tensor: int, dtype) -> int:
    """Bytes of one layer at work, forward: the products and what lies between them, without attention scores."""
    between = 4 * arch.hidden_size + 2 * arch.num_heads * arch.head_dim // tensor + arch.intermediate_size // tensor
    return tokens * (_matmul_outputs(arch, tensor) + between) * dtype.itemsize


def _scores(arch: Arch, pairs: int, tensor: int) -> int:
    """Bytes of one float32 array of attention scores of pairs of query and key."""
    return pairs * arch.num_heads // tensor * 4


def _prefill_work(arch: Arch, batch, tensor: int, dtype) -> int:
    """Bytes of one layer in the largest call that is not rare: prompts of one replica's budget, or a part of a long one."""
    usual = [(n, t, before) for n, t, before in prefill_sizes(batch) if n == 1 or not before]
    pairs = [n * min(t, QUERY_CHUNK) * (t + before * batch["page_size"]) for n, t, before in usual]
    work = (
        _layer_work(arch, n * t, tensor, dtype) + 2 * _scores(arch, p, tensor) for (n, t, _), p in zip(usual, pairs, strict=True)
    )
    return max(work, default=0)


def update_work(config, arch: Arch, layout: Layout, sizes, dtype, has_head: bool) -> int:
    """Forward and backward of one microbatch, whose gradients go into the sum as they are made. Scores and logits are computed
    again, so they exist in part.

    Two moments can need the most: the head's backward pass, which has one gradient of the whole head on each device, and a
    layer's. Counts of arrays that live side by side are those of programs compiled for TPUs.

    Args:
      sizes: (prompts, prompt tokens, rows of responses, tokens of a row) of a shard's microbatches.
    """
    tensor, context, c = layout.mesh.shape["tensor"], layout.shards("length"), config.learner
    split = layout.shards("embed")
    # On one device: of each sequence it has the queries of a part, and gathers the keys of the whole.
    shapes = [(prompts, u // context, responses, t // context) for prompts, u, responses, t in sizes]
    tokens = max(prompts * u + responses * t for prompts, u, responses, t in shapes)
    # Prompts attend first, then responses, and of either one chunk of queries at a time.
    pairs = max(
        max(prompts * min(u, QUERY_CHUNK) * u, responses * min(t, QUERY_CHUNK) * (u + t)) * context
        for prompts, u, responses, t in shapes
    )
    scores = 2 * _scores(arch, pairs, tensor) + _scores(arch, pairs, tensor) * dtype.itemsize // MASTER_BYTES
    layer = 3 * _layer_work(arch, tokens, tensor, dtype) // 2 + scores
    kept = {
        "full": arch.hidden_size,
        "offload": 0,  # it waits in the host's memory
        "dots": _matmul_outputs(arch, tensor),  # the layer's input in place of its output
        "none": 12 * arch.hidden_size
        + (6 * arch.intermediate_size + 3 * arch.num_heads * arch.head_dim) // tensor
        + 2 * _kv_size(arch, tensor)
        + 4 * (arch.num_heads * arch.head_dim // tensor + _kv_size(arch, tensor)) * arch.qk_norm,
    }[c.remat]
    cast = dtype.itemsize < MASTER_BYTES
    table, size = arch.vocab_size * arch.hidden_size // tensor, dtype.itemsize
    layer_params = (arch.num_params() - arch.vocab_size * arch.hidden_size * (1 if arch.tie_embeddings else 2)) // arch.num_layers
    always = arch.num_layers * tokens * kept * size  # for the backward pass
    always += arch.num_layers * layer_params // tensor // split * size * cast  # weights' shards, cast
    # Where weights are copied, the gradients of all layers are summed over the copies at the end: a second set of them.
    always += arch.num_layers * layer_params // tensor // split * MASTER_BYTES * (layout.mesh.shape["data"] > 1)
    head = min(c.logit_chunk, tokens) * arch.vocab_size // tensor * MASTER_BYTES * 2  # logits and their gradient
    own_gradient = split == 1 or not arch.tie_embeddings  # of the embedding; else it is the head's, and goes into the same sum
    head += table // split * (size * cast + MASTER_BYTES * own_gradient) + tokens * arch.hidden_size * (size + 2 * MASTER_BYTES)
    # The head's gradient; the head gathered and that gradient cast, which the compiler keeps together at times, at times not.
    head += table * (MASTER_BYTES + 3 * size // 2 * (split > 1))
    gathered = 2 * layer_params // tensor * size * (split > 1)  # a layer's weights and their gradients
    keys = (context - 1) * tokens * _kv_size(arch, tensor) * size
    return always + max(gathered + layer + 2 * keys, head * has_head)
