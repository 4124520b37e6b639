"""What a run will do, before it does anything: meshes, batch arithmetic, bytes per device, compiled programs.

Weights, gradients and optimizer state are counted exactly, from the shapes and layouts that the run uses; activations are
an estimate. The KV pool is at most what is said, unless `rollout.num_pages` fixes it: it is counted for prompts as long as
`data.max_prompt_tokens` allows, and a run makes it for the longest prompt that it has. Nothing here touches a device, so a
plan for 256 chips can be made on a laptop.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from jrl import platform
from jrl.algorithms.pieces import critic_head_named, needs_critic
from jrl.config import with_preset
from jrl.errors import UserError
from jrl.models import decoder
from jrl.models.arch import Arch
from jrl.models.load import read_arch
from jrl.models.unstack import worth_it
from jrl.plan.memory import held_bytes, phase_bytes, weight_shards
from jrl.plan.sizes import microbatch_sequences, program_sizes, volume
from jrl.rollout.backends import choose_backend
from jrl.shapes import default_slots, length_step
from jrl.sharding.layout import ROLLOUT_TABLE, TRAIN_TABLE, Layout
from jrl.sharding.memory_kinds import DEVICE, HOST
from jrl.sharding.mesh import describe, resolve_sizes


def model_of(config, name: str) -> Any:
    """The class of model that lies on a mesh."""
    if name == "critic":
        return decoder.critic_with(critic_head_named(config.critic.head))
    return decoder.RewardModel if name == "reward" else decoder.Decoder


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run in numbers; bytes are per device."""

    model: dict[str, Any]
    num_devices: int
    meshes: dict[str, dict[str, int]]  # model -> axis -> devices
    about: list[str]  # the step, its rollout and its updates, in words
    apart: tuple[str, ...]  # the models that have devices of their own
    batch: dict[str, int]
    held_bytes: dict[str, int]  # for the whole run
    host_bytes: dict[str, int]  # likewise, but in the memory of the device's host
    phase_bytes: dict[str, dict[str, int]]  # phase of a step -> what it needs besides
    programs: dict[str, list[tuple[int, ...]]]  # program -> the sizes it may be compiled for

    @property
    def peak_bytes(self) -> int:
        """What a device holds, and the phase that needs most, of the devices that need most."""
        return self.most_needed()[1]

    def most_needed(self, counted: Callable[[str], bool] = lambda _: True) -> tuple[str, int]:
        """The phase in which a device needs most, and how much with what it holds.

        Args:
          counted: which of the phases' parts are.
        """
        needs = {}
        for phase, parts in self.phase_bytes.items():
            held = sum(n for name, n in self.held_bytes.items() if self._pool(name) == self._pool(phase))
            needs[phase] = held + sum(n for name, n in parts.items() if counted(name))
        return max(needs.items(), key=lambda item: item[1])

    def _pool(self, label: str) -> str:
        """Whose devices a label of bytes is about."""
        of = {"generating": "rollout", "updating the critic": "critic"}.get(label, label.partition(":")[0].split()[0])
        return of if of in self.apart else "learner"

    def to_dict(self) -> dict[str, Any]:
        """For json."""
        return {**dataclasses.asdict(self), "peak_bytes": self.peak_bytes}

    def text(self) -> str:
        """For people."""
        m = self.model
        lines = [
            f"model      {m['family']}, {m['num_params'] / 1e6:,.1f} M parameters, {m['num_layers']} layers,"
            f" hidden {m['hidden_size']}, {m['num_heads']} heads, {m['num_kv_heads']} KV heads,"
            f" vocabulary {m['vocab_size']}, compute {m['compute_dtype']}",
            f"devices    {self.num_devices}",
            *(f"mesh       {name:<10}{describe(sizes)}" for name, sizes in self.meshes.items()),
            "",
            *self.about,
            "",
            "bytes per device",
            *(f"  {name:<40}{size_text(n):>12}" for name, n in self.held_bytes.items()),
            f"  {'held all the time':<40}{size_text(sum(self.held_bytes.values())):>12}",
        ]
        for name, n in self.host_bytes.items():
            lines.append(f"  {name:<40}{size_text(n):>12}  in its host's memory")
        for phase, parts in self.phase_bytes.items():
            lines.append(f"  {'while ' + phase:<40}{'+ ' + size_text(sum(parts.values())):>12}")
            lines += [f"    {name:<38}{size_text(n):>12}" for name, n in parts.items()]
        lines += [
            f"  {'peak':<40}{size_text(self.peak_bytes):>12}",
            "",
            "programs, compiled when a size first occurs; a run meets few of them",
        ]
        for name, sizes in self.programs.items():
            head, _, axes = name.partition(" ")
            lines.append(f"  {head:<20}at most {len(sizes):>4}, the largest {max(sizes, key=volume)} {axes}")
        return "\n".join(lines)


def num_devices(config) -> int:
    """The devices that the config's meshes fix, by their product; where none does, the devices of this machine."""
    apart = sum(config.pools.values())
    shared = config.stage == "rl" and not (config.pools.rollout or config.rollout.workers)
    for section in ("learner", "rollout") if shared else ("learner",):
        sizes = config[section].mesh.to_dict().values()
        if -1 not in sizes:
            return math.prod(sizes) + apart
    return len(jax.devices())


def make_plan(config, arch: Arch, num_devices: int, backend: str | None = None) -> Plan:
    """The plan of a validated config.

    Args:
      backend: "cpu", "gpu" or "tpu"; by default this machine's.

    Raises:
      UserError: a mesh that does not fit the number of devices or the model; sequences longer than the model's.
    """
    config = with_preset(config)
    layouts = abstract_layouts(config, num_devices)
    weights = {}
    for name, layout in layouts.items():
        own = read_arch(config.reward.model.path) if name == "reward" else arch
        with naming(_mesh_key(config, name)):
            layout.sharding(("act_heads",), (own.num_heads,))  # not weights: the forward pass splits them
            weights[name] = weight_shards(own, layout, model_of(config, name))
    batch = _batch(config, layouts)
    if batch["prompt_tokens"] + batch["response_tokens"] > arch.max_position:
        raise UserError(
            f"config.rollout.max_new_tokens={batch['response_tokens']}: with data.max_prompt_tokens="
            f"{batch['prompt_tokens']} that exceeds the {arch.max_position} positions of the model; lower one of them"
        )
    backend = backend or jax.default_backend()
    dtype = platform.compute_dtype(config.model.compute_dtype, backend)
    attention, _ = choose_backend(config.rollout.attention, backend, arch, layouts["rollout"], dtype, config.rollout.kv)
    with naming(f"config.rollout.unroll_layers={config.rollout.unroll_layers!r}"):
        worth_it(config.rollout.unroll_layers, backend, config.rollout.max_new_tokens)
    with naming(_mesh_key(config, "rollout")):
        held = held_bytes(config, arch, layouts, weights, batch, attention, dtype)
    phases = phase_bytes(config, arch, layouts, weights, batch, attention, dtype)
    facts = model_facts(arch, dtype)
    meshes = {name: dict(layout.mesh.shape) for name, layout in layouts.items()}
    programs = program_sizes(config, layouts, batch, attention)
    if workers := config.rollout.workers:  # whose devices are not among these
        del meshes["rollout"]
        programs = {name: sizes for name, sizes in programs.items() if not name.startswith("rollout.")}
    apart = tuple(name for name, count in config.pools.items() if count)
    return Plan(facts, num_devices, meshes, _about(batch, workers), apart, batch, held[DEVICE], held[HOST], phases, programs)


def model_facts(arch: Arch, dtype: Any) -> dict[str, Any]:
    return {
        "family": arch.family, "num_params": arch.num_params(), "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size, "num_heads": arch.num_heads, "num_kv_heads": arch.num_kv_heads,
        "vocab_size": arch.vocab_size, "compute_dtype": dtype.name,
    }  # fmt: skip


def _about(b: dict[str, int], workers: int) -> list[str]:
    here = f"{b['replicas']} replicas x {b['slots']} slots, pools of at most {b['num_pages']} pages of {b['page_size']} tokens"
    return [
        f"step       {b['prompts']} prompts x {b['group_size']} samples = {b['sequences']} sequences of at most"
        f" {b['prompt_tokens']} + {b['response_tokens']} tokens, at most {b['tokens']:,} tokens",
        f"rollout    {f'{workers} workers, each on devices of its own' if workers else here}",
        f"updates    {b['epochs']} epochs x {b['minibatches']} minibatches of {b['minibatch_prompts']} prompts"
        f" ({b['minibatch_sequences']} sequences); {b['updates']} in {b['steps']} steps"
        + (f", the policy's from step {b['policy_delay_steps']} on" if b["policy_delay_steps"] else ""),
        f"microbatch {b['shards']} shards x {b['microbatch_tokens']} tokens: {b['microbatch_sequences']} of the"
        f" longest sequences a shard, at most {b['microbatches']} microbatches a minibatch",
    ]


# Meshes and batches --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def naming(key: str) -> Iterator[None]:
    """Says which key of the config an error is about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{key}: {error}") from None


def _mesh_key(config, name: str) -> str:
    """Where the mesh of a model is set; critic and reference take the learner's where theirs is all 0."""
    return f"config.{name if any(config[name].mesh.to_dict().values()) else 'learner'}.mesh"


def abstract_layout(kind: Any, sizes: Mapping[str, int], num_devices: int) -> Layout:
    shape = resolve_sizes(kind, sizes, num_devices)
    mesh = AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    return Layout(mesh, TRAIN_TABLE if kind == "train" else ROLLOUT_TABLE, kind)  # type: ignore[arg-type]


def abstract_layouts(config, num_devices: int) -> dict[str, Layout]:
    """Of the models that the run has."""
    used = {
        "learner": True, "rollout": True,
        "critic": needs_critic(config.algorithm), "reference": config.algorithm.kl_in != "none",
        "reward": bool(config.reward.model.path),
    }  # fmt: skip
    layouts: dict[str, Layout] = {}
    if config.stage != "rl":
        used = {"learner": True}
    for name in (name for name, wanted in used.items() if wanted):
        sizes, kind = config[name].mesh.to_dict(), "rollout" if name == "rollout" else "train"
        own = config.pools.get(name, 0)
        sizes = sizes if any(sizes.values()) or not own else {"fsdp": -1}
        if name == "rollout" and config.rollout.workers:  # on devices of their own, which nobody here knows
            sizes = {"replica": -1}
        with naming(_mesh_key(config, name)):
            count = own or num_devices - sum(config.pools.values())
            layouts[name] = abstract_layout(kind, sizes, count) if any(sizes.values()) else layouts["learner"]
    return layouts


def _batch(config, layouts: dict[str, Layout]) -> dict[str, int]:
    r, a, c = config.rollout, config.algorithm, config.learner
    prompt, response = config.data.max_prompt_tokens, r.max_new_tokens
    sequences, replicas = r.prompts_per_step * r.group_size, layouts["rollout"].batch_shards
    shards, step = layouts["learner"].batch_shards, length_step(layouts["learner"].shards("length"))
    slots = r.slots or default_slots(sequences, replicas)
    width = -(-(prompt + response) // r.page_size)
    minibatch = sequences // a.minibatches
    per_microbatch = microbatch_sequences(c.microbatch_tokens, r.group_size, prompt, response, step)
    return {
        "steps": config.steps, "prompts": r.prompts_per_step, "group_size": r.group_size, "sequences": sequences,
        "prompt_tokens": prompt, "response_tokens": response,
        "tokens": r.prompts_per_step * prompt + sequences * response,
        "replicas": replicas, "slots": slots, "page_size": r.page_size,
        "width": width, "num_pages": r.num_pages or slots * width + width + 1,
        "epochs": a.epochs, "minibatches": a.minibatches, "minibatch_prompts": r.prompts_per_step // a.minibatches,
        "minibatch_sequences": minibatch, "updates": config.steps * a.epochs * a.minibatches,
        "policy_delay_steps": config.critic.policy_delay_steps if needs_critic(a) else 0,
        "shards": shards, "microbatch_tokens": c.microbatch_tokens, "microbatch_sequences": per_microbatch,
        "microbatches": -(-minibatch // (per_microbatch * shards)),
    }  # fmt: skip


def size_text(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:,.0f} {unit}" if unit in ("B", "KiB") else f"{n:,.1f} {unit}"
        n /= 1024
    raise AssertionError
