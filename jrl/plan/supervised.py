"""The plan of a stage that learns from data as they stand: one model, one mesh, one update a step."""

from typing import Any

import jax

from jrl import platform
from jrl.errors import UserError
from jrl.models.arch import Arch
from jrl.packing import pack_rows
from jrl.plan.memory import ADAM_MOMENTS, MASTER_BYTES, count, update_work, weight_shards
from jrl.plan.plan import Plan, abstract_layout, model_facts, naming
from jrl.plan.sizes import learner_shapes, packed_row_shapes
from jrl.sharding.layout import Layout
from jrl.sharding.memory_kinds import DEVICE, HOST
from jrl.stages import stage_of


def make_stage_plan(config, arch: Arch, num_devices: int, backend: str | None = None) -> Plan:
    """The plan of a validated config; arguments and errors are those of `make_plan`.

    Rows are counted as long as `data.max_tokens` allows.
    """
    stage, c = stage_of(config), config.learner
    with naming("config.learner.mesh"):
        layout = abstract_layout("train", c.mesh.to_dict(), num_devices)
        layout.sharding(("act_heads",), (arch.num_heads,))
        weights = weight_shards(arch, layout, stage.model)
    if config.data.max_tokens > arch.max_position:
        raise UserError(
            f"config.data.max_tokens={config.data.max_tokens}: exceeds the {arch.max_position} positions of the model; lower it"
        )
    dtype = platform.compute_dtype(config.model.compute_dtype, backend or jax.default_backend())
    shapes = update_sizes(config, stage, layout)
    bytes_of_weights = count(weights) * MASTER_BYTES
    held = {DEVICE: {"parameters, float32": bytes_of_weights}, HOST: {}}
    held[c.optimizer_memory]["Adam's moments, float32"] = bytes_of_weights * ADAM_MOMENTS
    phases = {
        "updating": {
            "gradients, sum of microbatches": bytes_of_weights,
            "a microbatch at work, estimate": update_work(config, arch, layout, shapes, dtype, stage.has_head),
        }
    }
    programs = {"policy.update (prompts, prompt tokens, rows, tokens of a row)": shapes}
    facts, d = model_facts(arch, dtype), config.data
    about = [
        f"stage      {config.stage}: {config.steps} updates, each on {d.examples_per_step} rows of the data ="
        f" {d.examples_per_step * stage.group} sequences of at most {d.max_tokens} tokens",
        f"microbatch {layout.batch_shards} shards x {c.microbatch_tokens} tokens",
    ]
    meshes = {"learner": dict(layout.mesh.shape)}
    return Plan(facts, num_devices, meshes, about, (), {}, held[DEVICE], held[HOST], phases, programs)


def update_sizes(config, stage: Any, layout: Layout) -> list[tuple[int, ...]]:
    """Sizes of the microbatches of an update, on one data shard."""
    d, budget = config.data, config.learner.microbatch_tokens
    if stage.packing is pack_rows:
        return packed_row_shapes(d.max_tokens, d.examples_per_step, budget, layout)
    longest = {"prompt_tokens": d.max_tokens, "response_tokens": d.max_tokens}
    batch = {"group_size": stage.group, "microbatch_tokens": budget} | longest
    return learner_shapes(batch, d.examples_per_step * stage.group, layout)
