"""The very programs of a run, with the shapes of their arguments instead of the arguments: to be compiled, not to be run.

Nothing here allocates an array, so the devices may be those of a topology that this machine does not have.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl import platform
from jrl.build import make_critic_learner, make_layouts, make_policy_learner, make_reference_learner
from jrl.config import choose_pieces, with_preset
from jrl.learner import Learner
from jrl.losses import policy_columns
from jrl.models import decoder
from jrl.models.arch import Arch
from jrl.packing import Packed
from jrl.plan.plan import Plan, make_plan
from jrl.plan.sizes import volume
from jrl.rollout.backends import choose_backend
from jrl.rollout.paged_attention import Table
from jrl.rollout.programs import EngineShape, Prompts, Slots
from jrl.rollout.programs import build as build_programs
from jrl.rollout.weights import int8_arrays
from jrl.sharding.layout import Layout

CRITIC_COLUMNS = ("weight", "share", "old_values", "returns")


class Program(NamedTuple):
    """A jitted function and its arguments as `jax.ShapeDtypeStruct`s."""

    name: str
    jitted: Any
    args: tuple[Any, ...]
    holds: tuple[str, ...]  # beginnings of the names in `Plan.held_bytes` of what is among the arguments


def run_programs(config, arch: Arch, devices: Sequence[jax.Device]) -> tuple[Plan, Iterator[Program]]:
    """A run's plan on these devices, and the largest program of each kind that it compiles, made one after another.

    Args:
      config: validated.
      devices: all of the run's, perhaps of a topology (`jax.experimental.topologies`).
    """
    config, backend = with_preset(config), devices[0].platform
    layouts = make_layouts(config, devices)
    plan = make_plan(config, arch, len(devices), backend)
    dtype = platform.compute_dtype(config.model.compute_dtype, backend)

    def programs() -> Iterator[Program]:
        yield from _policy_programs(config, arch, layouts, dtype, plan)
        if "critic" in plan.meshes:
            critic = make_critic_learner(config, arch, layouts["critic"], dtype)
            packed = abstract_packed(layouts["critic"], longest_pass(plan, "critic.update"), CRITIC_COLUMNS)
            yield from _updates("critic", critic, packed)
            yield _forward("critic.values", critic, plan, "values")
        if "reference" in plan.meshes:
            yield _forward(
                "reference.logprobs", make_reference_learner(config, arch, layouts["reference"], dtype), plan, "logprobs"
            )
        yield from _rollout_programs(config, arch, layouts["rollout"], dtype, plan)

    return plan, programs()


def sizes_of(plan: Plan, name: str) -> list[tuple[int, ...]]:
    """All sizes of one of a plan's programs."""
    return next(sizes for key, sizes in plan.programs.items() if key.partition(" ")[0] == name)


def longest_pass(plan: Plan, name: str) -> tuple[int, ...]:
    """The sizes of a learner's program of the most tokens: (prompts, prompt tokens, rows of responses, tokens of a row)."""
    return max(sizes_of(plan, name), key=lambda size: (size[0] * size[1] + size[2] * size[3], size))


def largest(plan: Plan, name: str) -> tuple[int, ...]:
    return max(sizes_of(plan, name), key=lambda size: (volume(size), size))


# Learners ------------------------------------------------------------------------------------------------------------


def abstract_packed(layout: Layout, sizes: tuple[int, ...], columns: Sequence[str]) -> Packed:
    """A microbatch of (prompts, prompt tokens, rows of responses, tokens of a row) a shard, one response in each row."""
    prompts, u, rows, t = sizes
    d = layout.batch_shards

    def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((d, *shape), dtype)

    packed = Packed(
        prompt_tokens=array(prompts, u), prompt_lens=array(prompts), tokens=array(rows, t), offsets=array(rows, t),
        prompt_of=array(rows), starts=array(rows), lens=array(rows),
        columns={name: array(rows, t, dtype=jnp.float32) for name in columns}, row=array(rows),
    )  # fmt: skip
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), packed, layout.tree(packed.axes, packed)
    )


def _policy_programs(config, arch: Arch, layouts: dict[str, Layout], dtype, plan: Plan) -> Iterator[Program]:
    policy = make_policy_learner(config, arch, layouts["learner"], dtype, choose_pieces(config).policy_loss)
    if any(name.startswith("policy.logprobs") for name in plan.programs):
        yield _forward("policy", policy, plan, "logprobs")
    packed = abstract_packed(policy.layout, longest_pass(plan, "policy.update"), policy_columns(config.algorithm))
    yield from _updates("policy", policy, packed)


def _updates(name: str, learner: Learner, packed: Packed) -> Iterator[Program]:
    for part, (jitted, args) in learner.abstract_programs(packed).items():
        yield Program(f"{name}.{part}", jitted, args, (f"{name}:",) if part == "apply" else (f"{name}: parameters",))


def _forward(name: str, learner: Learner, plan: Plan, method: str) -> Program:
    packed = abstract_packed(learner.layout, longest_pass(plan, f"{name}.{method}"), ())
    return Program(f"{name}.{method}", *learner.abstract_run(method, packed), (f"{name}: parameters",))


# Rollout -------------------------------------------------------------------------------------------------------------


def _rollout_programs(config, arch: Arch, layout: Layout, dtype, plan: Plan) -> Iterator[Program]:
    r, b = config.rollout, plan.batch
    backend, _ = choose_backend(r.attention, layout.mesh.devices.flat[0].platform, arch, layout, dtype, r.kv)
    shape = EngineShape(arch, b["num_pages"], b["page_size"], r.decode_chunk, (0,), dtype)
    programs = build_programs(shape, backend, layout)
    rows = layout.sharding(("batch",))

    def array(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((b["replicas"], *sizes), dtype, sharding=rows)

    pool = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.sharding(x.axes, x.shape))
        for name, x in backend.pool_arrays(shape.num_pages, shape.page_size).items()
    }
    params = abstract_rollout_params(config, arch, layout, dtype)
    whole_prompts = [size for size in sizes_of(plan, "rollout.prefill") if not size[2]]
    count, length, before = max(whole_prompts, key=lambda size: (size[0] * size[1], size))
    prompts = Prompts(
        tokens=array(count, length), targets=array(count, length), start=array(count), lens=array(count),
        table=array(count, length // b["page_size"]), prior=array(count, before),
    )  # fmt: skip
    holds = ("rollout: KV pool",)
    yield Program("rollout.prefill", programs.prefill, (False, params, pool, prompts), holds)
    n, width, groups, members, rows_of_them, pages = largest(plan, "rollout.decode")
    table = Table(
        own=array(n, width), owner=array(n), start=array(b["slots"]), skip=array(b["slots"]),
        shared=array(rows_of_them, pages), prefix=array(rows_of_them), members=array(groups, members), place=array(b["slots"]),
    )  # fmt: skip
    whole, real = array(b["slots"]), array(b["slots"], dtype=jnp.float32)
    slots = Slots(whole, whole, whole, whole, array(b["slots"], dtype=jnp.uint32), real, array(b["slots"], dtype=jnp.bool_))
    key = jax.eval_shape(lambda: jax.random.key(0))
    args = (0, params, pool, table, slots, None, key, jax.ShapeDtypeStruct((), jnp.int32))
    yield Program("rollout.decode", programs.decode, args, holds)


def abstract_rollout_params(config, arch: Arch, layout: Layout, dtype) -> Any:
    """Shapes, dtypes and shardings of what the rollout reads."""
    if config.rollout.weights == "int8":
        return _with_shardings(*int8_arrays(arch, layout, dtype))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), decoder.abstract_params(arch))
    return _with_shardings(shapes, layout.tree(decoder.param_axes(arch), shapes))


def abstract_publish(config, arch: Arch, devices: Sequence[jax.Device]) -> tuple[Any, Any, Any]:
    """What `jrl.sharding.reshard.reshard` is given to publish weights: a tree, shardings and a dtype."""
    layouts, dtype = make_layouts(config, devices), platform.compute_dtype(config.model.compute_dtype, devices[0].platform)
    target = jax.tree.map(lambda x: x.sharding, abstract_rollout_params(config, arch, layouts["rollout"], dtype))
    if config.rollout.weights == "int8":
        return _with_shardings(*int8_arrays(arch, layouts["learner"], dtype)), target, None
    shapes = decoder.abstract_params(arch)
    return _with_shardings(shapes, layouts["learner"].tree(decoder.param_axes(arch), shapes)), target, dtype


def _with_shardings(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
