"""What a run will do, before it does anything: meshes, batch arithmetic, bytes per device, compiled programs.

Weights, gradients and optimizer state are counted exactly, from the shapes and layouts that the run uses; activations are
an estimate. The KV pool is at most what is said, unless `rollout.num_pages` fixes it: it is counted for prompts as long as
`data.max_prompt_tokens` allows, and a run makes it for the longest prompt that it has. Nothing here touches a device, so a
plan for 256 chips can be made on a laptop.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from jrl import platform
from jrl.errors import UserError
from jrl.models import decoder
from jrl.models.arch import Arch
from jrl.models.attention import QUERY_CHUNK
from jrl.models.unstack import worth_it
from jrl.packing import LENGTH_STEP
from jrl.rollout.backends import Backend, choose_backend
from jrl.rollout.engine import PREFILL_TOKENS
from jrl.rollout.scheduler import OPEN_PREFIXES
from jrl.rollout.weights import int8_arrays
from jrl.shapes import bucket, default_slots
from jrl.sharding.layout import ROLLOUT_TABLE, TRAIN_TABLE, Layout
from jrl.sharding.mesh import describe, resolve_sizes

MASTER_BYTES = 4  # parameters, gradients, moments: float32
ADAM_MOMENTS = 2


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run in numbers; bytes are per device."""

    model: dict[str, Any]
    num_devices: int
    meshes: dict[str, dict[str, int]]  # model -> axis -> devices
    batch: dict[str, int]
    held_bytes: dict[str, int]  # for the whole run
    phase_bytes: dict[str, dict[str, int]]  # phase of a step -> what it needs besides
    programs: dict[str, list[tuple[int, ...]]]  # program -> the sizes it may be compiled for

    @property
    def peak_bytes(self) -> int:
        """What is held, and the phase that needs most."""
        return sum(self.held_bytes.values()) + max(sum(phase.values()) for phase in self.phase_bytes.values())

    def to_dict(self) -> dict[str, Any]:
        """For json."""
        return {**dataclasses.asdict(self), "peak_bytes": self.peak_bytes}

    def text(self) -> str:
        """For people."""
        m, b = self.model, self.batch
        lines = [
            f"model      {m['family']}, {m['num_params'] / 1e6:,.1f} M parameters, {m['num_layers']} layers,"
            f" hidden {m['hidden_size']}, {m['num_heads']} heads, {m['num_kv_heads']} KV heads,"
            f" vocabulary {m['vocab_size']}, compute {m['compute_dtype']}",
            f"devices    {self.num_devices}",
            *(f"mesh       {name:<10}{describe(sizes)}" for name, sizes in self.meshes.items()),
            "",
            f"step       {b['prompts']} prompts x {b['group_size']} samples = {b['sequences']} sequences of at most"
            f" {b['prompt_tokens']} + {b['response_tokens']} tokens, at most {b['tokens']:,} tokens",
            f"rollout    {b['replicas']} replicas x {b['slots']} slots, pools of at most {b['num_pages']} pages of"
            f" {b['page_size']} tokens",
            f"updates    {b['epochs']} epochs x {b['minibatches']} minibatches of {b['minibatch_prompts']} prompts"
            f" ({b['minibatch_sequences']} sequences); {b['updates']} in {b['steps']} steps"
            + (f", the policy's from step {b['policy_delay_steps']} on" if b["policy_delay_steps"] else ""),
            f"microbatch {b['shards']} shards x {b['microbatch_tokens']} tokens: {b['microbatch_sequences']} of the"
            f" longest sequences a shard, at most {b['microbatches']} microbatches a minibatch",
            "",
            "bytes per device",
            *(f"  {name:<40}{_size(n):>12}" for name, n in self.held_bytes.items()),
            f"  {'held all the time':<40}{_size(sum(self.held_bytes.values())):>12}",
        ]
        for phase, parts in self.phase_bytes.items():
            lines.append(f"  {'while ' + phase:<40}{'+ ' + _size(sum(parts.values())):>12}")
            lines += [f"    {name:<38}{_size(n):>12}" for name, n in parts.items()]
        lines += [
            f"  {'peak':<40}{_size(self.peak_bytes):>12}",
            "",
            "programs, compiled when a size first occurs; a run meets few of them",
        ]
        for name, sizes in self.programs.items():
            head, _, axes = name.partition(" ")
            lines.append(f"  {head:<20}at most {len(sizes):>4}, the largest {max(sizes, key=_volume)} {axes}")
        return "\n".join(lines)


def num_devices(config) -> int:
    """The devices that the config's meshes fix, by their product; where none does, the devices of this machine."""
    for section in ("learner", "rollout"):
        sizes = config[section].mesh.to_dict().values()
        if -1 not in sizes:
            return math.prod(sizes)
    return len(jax.devices())


def make_plan(config, arch: Arch, num_devices: int) -> Plan:
    """The plan of a validated config.

    Raises:
      UserError: a mesh that does not fit the number of devices or the model; sequences longer than the model's.
    """
    layouts = _layouts(config, num_devices)
    weights = {}
    for name, layout in layouts.items():
        with _naming(_mesh_key(config, name)):
            layout.sharding(("act_heads",), (arch.num_heads,))  # not weights: the forward pass splits them
            weights[name] = _weights(arch, layout, name == "critic")
    batch = _batch(config, layouts)
    if batch["prompt_tokens"] + batch["response_tokens"] > arch.max_position:
        raise UserError(
            f"config.rollout.max_new_tokens={batch['response_tokens']}: with data.max_prompt_tokens="
            f"{batch['prompt_tokens']} that exceeds the {arch.max_position} positions of the model; lower one of them"
        )
    dtype = platform.compute_dtype(config.model.compute_dtype)
    backend, _ = choose_backend(
        config.rollout.attention, jax.default_backend(), arch, layouts["rollout"], dtype, config.rollout.kv
    )
    with _naming(f"config.rollout.unroll_layers={config.rollout.unroll_layers!r}"):
        worth_it(config.rollout.unroll_layers, jax.default_backend(), config.rollout.max_new_tokens)
    with _naming(_mesh_key(config, "rollout")):
        held = _held(config, layouts, weights, batch, backend, dtype)
    phases = _phases(config, arch, layouts, weights, batch, dtype)
    facts = {
        "family": arch.family, "num_params": arch.num_params(), "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size, "num_heads": arch.num_heads, "num_kv_heads": arch.num_kv_heads,
        "vocab_size": arch.vocab_size, "compute_dtype": dtype.name,
    }  # fmt: skip
    meshes = {name: dict(layout.mesh.shape) for name, layout in layouts.items()}
    return Plan(facts, num_devices, meshes, batch, held, phases, _programs(config, layouts, batch, backend))


# Meshes and batches --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _naming(key: str) -> Iterator[None]:
    """Says which key of the config an error is about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{key}: {error}") from None


def _mesh_key(config, name: str) -> str:
    """Where the mesh of a model is set; critic and reference take the learner's where theirs is all 0."""
    return f"config.{name if any(config[name].mesh.to_dict().values()) else 'learner'}.mesh"


def _abstract_layout(kind: Any, sizes: Mapping[str, int], num_devices: int) -> Layout:
    shape = resolve_sizes(kind, sizes, num_devices)
    mesh = AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    return Layout(mesh, TRAIN_TABLE if kind == "train" else ROLLOUT_TABLE, kind)  # type: ignore[arg-type]


def _layouts(config, num_devices: int) -> dict[str, Layout]:
    """Of the models that the run has."""
    used = {
        "learner": True, "rollout": True,
        "critic": config.algorithm.name == "ppo", "reference": config.algorithm.kl_in != "none",
    }  # fmt: skip
    layouts: dict[str, Layout] = {}
    for name in (name for name, wanted in used.items() if wanted):
        sizes, kind = config[name].mesh.to_dict(), "rollout" if name == "rollout" else "train"
        with _naming(_mesh_key(config, name)):
            layouts[name] = _abstract_layout(kind, sizes, num_devices) if any(sizes.values()) else layouts["learner"]
    return layouts


def _batch(config, layouts: dict[str, Layout]) -> dict[str, int]:
    r, a, c = config.rollout, config.algorithm, config.learner
    prompt, response = config.data.max_prompt_tokens, r.max_new_tokens
    sequences, replicas = r.prompts_per_step * r.group_size, layouts["rollout"].batch_shards
    shards = layouts["learner"].batch_shards
    slots = r.slots or default_slots(sequences, replicas)
    width = -(-(prompt + response) // r.page_size)
    minibatch = sequences // a.minibatches
    per_microbatch = _microbatch_sequences(c.microbatch_tokens, r.group_size, prompt, response)
    return {
        "steps": config.steps, "prompts": r.prompts_per_step, "group_size": r.group_size, "sequences": sequences,
        "prompt_tokens": prompt, "response_tokens": response,
        "tokens": r.prompts_per_step * prompt + sequences * response,
        "replicas": replicas, "slots": slots, "page_size": r.page_size,
        "width": width, "num_pages": r.num_pages or slots * width + width + 1,
        "epochs": a.epochs, "minibatches": a.minibatches, "minibatch_prompts": r.prompts_per_step // a.minibatches,
        "minibatch_sequences": minibatch, "updates": config.steps * a.epochs * a.minibatches,
        "policy_delay_steps": config.critic.policy_delay_steps if a.name == "ppo" else 0,
        "shards": shards, "microbatch_tokens": c.microbatch_tokens, "microbatch_sequences": per_microbatch,
        "microbatches": -(-minibatch // (per_microbatch * shards)),
    }  # fmt: skip


def _microbatch_sequences(budget: int, group_size: int, prompt: int, response: int) -> int:
    """Responses of a full microbatch: whole groups where they fit, since a group's prompt is computed once."""
    prompt, response = bucket(prompt, LENGTH_STEP), bucket(response, LENGTH_STEP)
    whole_groups = budget // (prompt + group_size * response)
    return max(whole_groups * group_size or (budget - prompt) // response, 1)


# Bytes ---------------------------------------------------------------------------------------------------------------


def _weights(arch: Arch, layout: Layout, critic: bool) -> list[tuple[tuple[int, ...], Any]]:
    """(shape on one device, partition) of every weight."""
    model: Any = decoder.Critic if critic else decoder.Decoder
    shapes = jax.tree.leaves(decoder.abstract_params(arch, model))
    shardings = jax.tree.leaves(layout.tree(decoder.param_axes(arch, model), decoder.abstract_params(arch, model)))
    return [(s.shard_shape(x.shape), s.spec) for x, s in zip(shapes, shardings, strict=True)]


def _count(weights: list[tuple[tuple[int, ...], Any]]) -> int:
    return sum(math.prod(shape) for shape, _ in weights)


def _held(config, layouts, weights, batch, backend: Backend, dtype) -> dict[str, int]:
    held: dict[str, int] = {}
    for name in ("learner", "critic"):
        if name in weights:
            label = "policy" if name == "learner" else name
            held[f"{label}: parameters, float32"] = _count(weights[name]) * MASTER_BYTES
            held[f"{label}: Adam's moments, float32"] = _count(weights[name]) * MASTER_BYTES * ADAM_MOMENTS
    if "reference" in weights:
        held["reference: parameters, float32"] = _count(weights["reference"]) * MASTER_BYTES
    rollout = layouts["rollout"]
    pool = backend.pool_arrays(batch["num_pages"], batch["page_size"]).values()
    shards = (math.prod(rollout.sharding(x.axes, x.shape).shard_shape(x.shape)) * jnp.dtype(x.dtype).itemsize for x in pool)
    kind = dtype.name if config.rollout.kv == "same" else config.rollout.kv
    held[f"rollout: KV pool, {kind}, at most"] = sum(shards)
    return held


def _phases(config, arch: Arch, layouts, weights, batch, dtype) -> dict[str, dict[str, int]]:
    """The rollout's weights are let go before the updates and made anew after them."""
    rollout = _rollout_weights(config, arch, layouts["rollout"], weights, dtype)
    tensor = layouts["rollout"].mesh.shape["tensor"]
    tokens = batch["slots"] * (config.rollout.speculate + 1)  # of a pass of decoding
    decode_logits = tokens * arch.vocab_size // tensor * 4 * 2  # logits and their probabilities, float32
    keys = batch["slots"] * (batch["prompt_tokens"] + batch["response_tokens"])
    gathered = keys * _kv_size(arch, tensor) * (dtype.itemsize + (config.rollout.kv == "int8"))  # as they lie, and as read
    # The head as it is multiplied with: on CPU XLA converts all of it first.
    head = arch.vocab_size * arch.hidden_size // tensor * dtype.itemsize * (config.rollout.weights == "int8")
    work = max(_prefill_work(arch, batch, tensor, dtype), decode_logits + gathered + head)
    phases = {"generating": {**rollout, "work arrays, estimate": work}}
    for name in ("learner", "critic"):
        if name in weights:
            sums = _count(weights[name]) * MASTER_BYTES
            work = _activations(config, arch, layouts[name], batch, dtype, has_head=name == "learner")
            phases[f"updating the {'policy' if name == 'learner' else name}"] = {
                "gradients, sum of microbatches": sums,
                "gradients, one microbatch": sums,
                "activations, estimate": work,
            }
    return phases


def _rollout_weights(config, arch: Arch, layout: Layout, weights, dtype) -> dict[str, int]:
    """What the rollout's copy takes: none where dtype and placement are the policy's, all of it where it is quantized."""
    if config.rollout.weights == "int8":
        pairs = zip(*map(jax.tree.leaves, int8_arrays(arch, layout, dtype)), strict=True)
        return {"rollout weights, int8": sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in pairs)}
    copied = sum(
        math.prod(shape)
        for (shape, spec), (train_shape, train_spec) in zip(weights["rollout"], weights["learner"], strict=True)
        if dtype.itemsize != MASTER_BYTES or not _same_placement(spec, train_spec, shape, train_shape)
    )
    label = f"rollout weights, {dtype.name}" if copied else "rollout weights, the policy's own"
    return {label: copied * dtype.itemsize}


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


def _layer_work(arch: Arch, tokens: int, pairs: int, tensor: int, dtype) -> int:
    """Bytes of one layer at work: the products, what lies between them, and attention scores of pairs of query and key."""
    between = 4 * arch.hidden_size + 2 * arch.num_heads * arch.head_dim // tensor + arch.intermediate_size // tensor
    scores = pairs * arch.num_heads // tensor * 4 * 2  # scores and weights, float32
    return tokens * (_matmul_outputs(arch, tensor) + between) * dtype.itemsize + scores


def _prefill_work(arch: Arch, batch, tensor: int, dtype) -> int:
    """Bytes of one layer in the largest call that is not rare: prompts of one replica's budget, or a part of a long one."""
    usual = [(n, t, before) for n, t, before in _prefill_sizes(batch, replicas=1) if n == 1 or not before]
    pairs = [n * min(t, QUERY_CHUNK) * (t + before * batch["page_size"]) for n, t, before in usual]
    return max((_layer_work(arch, n * t, p, tensor, dtype) for (n, t, _), p in zip(usual, pairs, strict=True)), default=0)


def _activations(config, arch: Arch, layout: Layout, batch, dtype, has_head: bool) -> int:
    """Of one microbatch, forward and backward; scores and logits are computed again, so they exist in part only."""
    tensor, c = layout.mesh.shape["tensor"], config.learner
    shapes = _learner_shapes(batch, batch["minibatch_sequences"], layout.batch_shards)
    tokens = max(prompts * u + responses * t for prompts, u, responses, t in shapes)
    # Prompts attend first, then responses, and of either one chunk of queries at a time.
    layer = max(
        _layer_work(
            arch, prompts * u + responses * t,
            max(prompts * min(u, QUERY_CHUNK) * u, responses * min(t, QUERY_CHUNK) * (u + t)), tensor, dtype,
        )
        for prompts, u, responses, t in shapes
    )  # fmt: skip
    kept = {
        "full": arch.hidden_size,
        "dots": arch.hidden_size + _matmul_outputs(arch, tensor),
        "none": 6 * arch.hidden_size + 2 * _matmul_outputs(arch, tensor),
    }[c.remat]
    head = min(c.logit_chunk, tokens) * arch.vocab_size // tensor * 4 * 3 if has_head else 0
    layers = arch.num_layers * tokens * kept * dtype.itemsize
    split = layout.mesh.shape["fsdp"] > 1  # then the weights at work are gathered, a layer at a time
    gathered = arch.num_params() // arch.num_layers // tensor * dtype.itemsize * split
    return layers + max(2 * layer, head) + gathered


# Programs ------------------------------------------------------------------------------------------------------------


def _buckets(most: int, least: int = 1) -> list[int]:
    return sorted({bucket(n, least) for n in range(1, most + 1)})


def _powers(most: int) -> list[int]:
    return [1 << i for i in range((most - 1).bit_length() + 1)] if most > 0 else []


def _volume(sizes: tuple[int, ...]) -> int:
    return math.prod(max(n, 1) for n in sizes)


def _programs(config, layouts: dict[str, Layout], batch: dict[str, int], backend: Backend) -> dict[str, list[tuple[int, ...]]]:
    """All sizes that rounding allows; a run meets few of them, because its prompts have few lengths.

    They are those of prompts as long as allowed. Where the longest is shorter there are no more of them, but the pages of a
    decode call's row may end at another number.
    """
    a, axes = config.algorithm, "(prompts, prompt tokens, responses, response tokens)"
    samples = max(batch["group_size"], config.eval.samples)

    def passes(name: str, rows: int) -> list[tuple[int, ...]]:
        return _learner_shapes(batch, rows, layouts[name].batch_shards)

    programs: dict[str, list[tuple[int, ...]]] = {
        "rollout.prefill (prompts, tokens, pages cached before)": _prefill_sizes(batch, batch["replicas"]),
        "rollout.decode (rows, pages of a row, shared prefixes, their members, their pages)": _decode_sizes(
            batch, samples, backend.row_pages
        ),
        "rollout.speculate (rows, pages of a row, shared prefixes, their members, their pages)": (
            _decode_sizes(batch, samples, backend.row_pages) if config.rollout.speculate else []
        ),
        "rollout.copy (pages)": [(n,) for n in _buckets(batch["slots"])] if samples > 1 else [],
        f"policy.update {axes}": passes("learner", batch["minibatch_sequences"]),
    }
    if a.epochs * a.minibatches > 1 or a.kl_in == "reward":
        programs[f"policy.logprobs {axes}"] = passes("learner", batch["sequences"])
    if "reference" in layouts:
        programs[f"reference.logprobs {axes}"] = passes("reference", batch["sequences"])
    if "critic" in layouts:
        programs[f"critic.values {axes}"] = passes("critic", batch["sequences"])
        programs[f"critic.update {axes}"] = passes("critic", batch["minibatch_sequences"])
    return {name: sizes for name, sizes in programs.items() if sizes}


def _longest_prefix(batch: dict[str, int]) -> int:
    """Tokens that are cached at once for samples to start from: all but the last one of what there is of a sequence."""
    preempted = batch["num_pages"] - 1 < batch["slots"] * batch["width"]  # then it is a prompt and most of its response
    return batch["prompt_tokens"] - 1 + (batch["response_tokens"] - 1) * preempted


def _prefill_sizes(batch: dict[str, int], replicas: int) -> list[tuple[int, ...]]:
    """(prompts, tokens, pages cached before), as `Engine` rounds them.

    Any number of pages may come before any number of tokens, as a call has several prompts. And where there are several
    replicas the shortest prompts of one, which are many, may share a call with a long prompt of another.
    """
    page, longest = batch["page_size"], _longest_prefix(batch)
    together = max(batch["slots"], OPEN_PREFIXES)
    sizes = set()
    for before, left in ((0, longest), *((n, longest - page) for n in _powers((longest - 1) // page))):
        for size in _buckets(min(left, PREFILL_TOKENS), page):
            length = -(-size // page) * page
            fitting = max(PREFILL_TOKENS // (length if replicas == 1 else page), 1)
            sizes |= {(n, length, before) for n in _powers(min(fitting, together))}
    return sorted(sizes)


def _decode_sizes(batch: dict[str, int], samples: int, row_pages: int | None) -> list[tuple[int, ...]]:
    """(rows, pages of a row, shared prefixes, their members, their pages), as `TableMaker` rounds them.

    Room that was made for other prefixes is used again where it is not much too large, so a run meets few of these pairs.
    """
    slots, width = batch["slots"], batch["width"]
    row = min(width, row_pages or width)
    rows = [(slots, n) for n in sorted({min(n, row) for n in _buckets(width)})]
    most = slots * -(-width // row)
    rows += [(n, row) for n in sorted({max(bucket(n), slots + 1) for n in range(slots + 1, most + 1)})]
    shareable = _longest_prefix(batch) // batch["page_size"]
    members = _powers(min(samples, slots))[1:] if shareable else []
    shared = [(0, 1, 1)]
    shared += [(p, n, pages) for p in _powers(slots // 2) for n in members for pages in _powers(shareable)]
    return [(*one, *other) for one in rows for other in shared]


def _learner_shapes(batch: dict[str, int], rows: int, shards: int) -> list[tuple[int, ...]]:
    """Sizes of the microbatches, on one shard, into which `jrl.packing.pack` splits `rows` sequences."""
    group, budget = batch["group_size"], batch["microbatch_tokens"]
    rows_per_shard = -(-rows // shards)
    groups = -(-rows_per_shard // group)
    remainders = _powers(groups)  # groups that are left for each shard
    shapes = set()
    for u in _buckets(batch["prompt_tokens"], LENGTH_STEP):
        for t in _buckets(batch["response_tokens"], LENGTH_STEP):
            most = _microbatch_sequences(budget, group, u, t)
            shapes |= {(-(-size // group), u, size, t) for size in (min(most, n * group) for n in remainders)}
    return sorted(shapes)


def _size(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:,.0f} {unit}" if unit in ("B", "KiB") else f"{n:,.1f} {unit}"
        n /= 1024
    raise AssertionError
