"""How long a step takes, modelled: arithmetic, memory and communication of each phase against a chip's rates.

Nothing here is measured. The shares of peak rates below are assumptions, the same for every chip; counts of operations and
bytes are those of the programs that jrl runs. Two bounds are given: communication wholly hidden behind the rest, and not at
all. Responses are taken to be as long as they may be, and sequences not to share what they read of the cache.

d, f, c, t are the sizes of data, fsdp, context and tensor. A collective among k devices with B bytes on each gives every
device (k - 1) B to receive in an all-gather, (k - 1)/k B in a reduce-scatter and twice that in an all-reduce.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jrl.algorithms.pieces import needs_old_logprobs
from jrl.models.arch import Arch
from jrl.plan.chips import Chip
from jrl.plan.plan import Plan

MATMUL_SHARE = 0.55  # of peak arithmetic, in large products
READ_SHARE = 0.75  # of peak memory bandwidth
LINK_SHARE = 0.8  # of peak link bandwidth
COLLECTIVE_SECONDS = 2e-6  # to begin a collective
HOP_SECONDS = 1e-6  # for each link on its way
HOST_RATE = 12e9  # bytes per second and direction between a device and its host: 16 lanes of PCIe 3.0, less what it costs

COMPUTE_BYTES = 2  # bfloat16, of gradients between devices too
WHOLE_TORUS = 64  # devices of a torus with three axes from which on a gather among all of them is made as a sum
PASSES = {"none": 3, "dots": 3, "full": 4, "offload": 4}  # of a forward pass's products, in forward, backward and computing again


@dataclasses.dataclass(frozen=True)
class Phase:
    """One device's work in a phase of a step, in operations and bytes, and in seconds at the assumed shares of the peaks."""

    flops: float
    read_bytes: float
    received_bytes: float
    busy_seconds: float  # arithmetic or memory, whichever takes longer
    link_seconds: float

    @property
    def hidden_seconds(self) -> float:
        """With communication hidden behind the rest where it is the shorter."""
        return max(self.busy_seconds, self.link_seconds)

    @property
    def exposed_seconds(self) -> float:
        """With communication after the rest."""
        return self.busy_seconds + self.link_seconds

    def __add__(self, other: "Phase") -> "Phase":
        return Phase(*(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(Phase)))

    def times(self, n: float) -> "Phase":
        return Phase(*(getattr(self, f.name) * n for f in dataclasses.fields(Phase)))


@dataclasses.dataclass(frozen=True)
class StepCost:
    """A step on one set of devices, its phases one after another."""

    phases: dict[str, Phase]
    tokens: int  # of the step's responses

    @property
    def hidden_seconds(self) -> float:
        return sum(p.hidden_seconds for p in self.phases.values())

    @property
    def exposed_seconds(self) -> float:
        return sum(p.exposed_seconds for p in self.phases.values())

    def to_dict(self) -> dict[str, Any]:
        """For json."""
        phases = {
            name: {**dataclasses.asdict(p), "hidden_seconds": p.hidden_seconds, "exposed_seconds": p.exposed_seconds}
            for name, p in self.phases.items()
        }
        bounds = {"hidden_seconds": self.hidden_seconds, "exposed_seconds": self.exposed_seconds}
        return {"phases": phases, **bounds, "response_tokens": self.tokens}

    def text(self) -> str:
        """For people."""
        head = ("seconds of a step, modelled", "busy", "links", "hidden", "exposed")
        lines = [f"{head[0]:<42}" + "".join(f"{h:>10}" for h in head[1:])]
        for name, p in self.phases.items():
            cells = (p.busy_seconds, p.link_seconds, p.hidden_seconds, p.exposed_seconds)
            lines.append(f"  {name:<40}" + "".join(f"{x:>10.3f}" for x in cells))
        lines.append(f"  {'all':<40}{'':>20}{self.hidden_seconds:>10.3f}{self.exposed_seconds:>10.3f}")
        return "\n".join(lines)


def step_cost(plan: Plan, arch: Arch, config, chip: Chip) -> StepCost:
    """The cost of one step of a plan."""
    phases = {"generate: prompts": _prefill(plan, arch, chip), "generate: responses": _decode(plan, arch, config, chip)}
    a = config.algorithm
    updates = a.epochs * a.minibatches
    forward, update = (_learner_pass(plan, arch, config, chip, "learner", learns) for learns in (False, True))
    if needs_old_logprobs(a):
        phases["old logprobs"] = forward
    if "reference" in plan.meshes:
        phases["reference logprobs"] = _learner_pass(plan, arch, config, chip, "reference", False)
    if "critic" in plan.meshes:
        phases["values"] = _learner_pass(plan, arch, config, chip, "critic", False)
        phases["update the critic"] = _learner_pass(plan, arch, config, chip, "critic", True).times(a.epochs)
        phases["update the critic"] += _apply(plan, "critic", chip).times(updates)
    phases["update"] = update.times(a.epochs) + _apply(plan, "policy", chip).times(updates)
    phases["publish"] = _publish(plan, chip)
    return StepCost(phases, plan.batch["sequences"] * plan.batch["response_tokens"])


def _phase(chip: Chip, flops: float, read: float, collectives: Sequence[tuple[int, int, float, float]]) -> Phase:
    """Work and (group, spread, bytes received, count) of collectives."""
    links = sum(
        received / (chip.receive_rate(group, spread) * LINK_SHARE) + count * (COLLECTIVE_SECONDS + chip.hops(group) * HOP_SECONDS)
        for group, spread, received, count in collectives
        if group > 1
    )
    received = sum(received for group, _, received, _ in collectives if group > 1)
    busy = max(flops / (chip.flops * MATMUL_SHARE), read / (chip.hbm_rate * READ_SHARE))
    return Phase(flops, read, received, busy, links)


# Numbers of a model --------------------------------------------------------------------------------------------------


def matrix_params(arch: Arch, head: bool = True) -> int:
    """Weights that every token is multiplied with."""
    embedding = arch.vocab_size * arch.hidden_size
    body = arch.num_params() - embedding * (1 if arch.tie_embeddings else 2)
    return body + embedding * head


def attention_flops(arch: Arch, queries: float, keys: float) -> float:
    """Of scores and weighted sums, in all layers."""
    return 4 * arch.num_layers * arch.num_heads * arch.head_dim * queries * keys


def _kv_bytes(arch: Arch) -> int:
    """Of one token, in every layer."""
    return 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * COMPUTE_BYTES


# Learner -------------------------------------------------------------------------------------------------------------


def _learner_pass(plan: Plan, arch: Arch, config, chip: Chip, model: str, learns: bool) -> Phase:
    """All sequences of a step through a model once, and back where it learns."""
    b, mesh = plan.batch, plan.meshes[model]
    d, f, c, t = (mesh.get(axis, 1) for axis in ("data", "fsdp", "context", "tensor"))
    passes = PASSES[config.learner.remat] if learns else 1
    again = passes - 3 if learns else 0  # forward passes that the backward pass repeats
    prompt, response, sequences = b["prompt_tokens"], b["response_tokens"], b["sequences"] / (d * f)  # of one shard
    together = min(b["microbatch_sequences"], sequences)
    prompts = sequences / together * math.ceil(together / b["group_size"])  # anew in every microbatch that has some of a group
    tokens = (prompts * prompt + sequences * response) / c  # of one device, which computes 1/t of each
    pairs = (prompts * prompt * prompt + sequences * response * (prompt + response)) / c
    head = model != "critic"
    flops = passes * (2 * matrix_params(arch, head) * tokens + attention_flops(arch, 1, pairs)) / t
    microbatches = b["microbatches"] * b["minibatches"]
    held = arch.num_params() / t  # weights of a tensor shard
    split = f * c  # ways in which each is split
    gathers = 2 if learns else 1
    # Among all devices of a torus with three axes the TPU compiler makes an all-reduce where a reduce-scatter is asked for,
    # and from 4 x 4 x 4 on also where an all-gather is (seen for v5p).
    whole = chip.torus_axes == 3 and split == plan.num_devices
    weights = gathers * held * COMPUTE_BYTES * (split - 1) / split * microbatches
    weights *= 2 if whole and split >= WHOLE_TORUS else 1
    collectives = [(split, t, weights, gathers * arch.num_layers * microbatches)]
    if learns:
        scattered = held * COMPUTE_BYTES * (split - 1) / split * microbatches * (2 if whole else 1)
        summed = 2 * held / split * COMPUTE_BYTES * (d - 1) / d * microbatches
        collectives += [(split, t, scattered, arch.num_layers * microbatches), (d, f * c * t, summed, microbatches)]
    rows = 2 * (2 if learns else 1) + 2 * again  # all-reduces of a layer's activations over tensor
    activations = rows * arch.num_layers * 2 * tokens * arch.hidden_size * COMPUTE_BYTES * (t - 1) / t
    collectives.append((t, 1, activations, rows * arch.num_layers * microbatches))
    keys = (2 if learns else 1) + again
    gathered = keys * _kv_bytes(arch) / min(t, arch.num_kv_heads) * tokens * (c - 1)
    collectives.append((c, t, gathered, keys * arch.num_layers * microbatches))
    read = gathers * held * COMPUTE_BYTES * microbatches
    far: float = plan.host_bytes.get(f"{model}: parameters, float32", 0) * microbatches
    if learns and config.learner.remat == "offload":  # layers' inputs: out in the forward pass, back in the backward pass
        far += 2 * arch.num_layers * tokens * arch.hidden_size * COMPUTE_BYTES
    return _with_host(_phase(chip, flops, read, collectives), far)


def _apply(plan: Plan, model: str, chip: Chip) -> Phase:
    """The optimizer reads gradients, weights and moments, and writes all but the first."""
    params = plan.held_bytes[f"{model}: parameters, float32"]
    return _with_host(_phase(chip, 0, 7 * params, []), plan.host_bytes.get(f"{model}: Adam's moments, float32", 0))


def _with_host(phase: Phase, moved: float) -> Phase:
    """With so many bytes brought from the host meanwhile; perhaps as many go back, which takes no time of its own."""
    return dataclasses.replace(phase, link_seconds=phase.link_seconds + moved / HOST_RATE)


# Rollout -------------------------------------------------------------------------------------------------------------


def _prefill(plan: Plan, arch: Arch, chip: Chip) -> Phase:
    b, t = plan.batch, plan.meshes["rollout"]["tensor"]
    tokens = b["prompts"] * b["prompt_tokens"] / b["replicas"]
    flops = (2 * matrix_params(arch, head=False) * tokens + attention_flops(arch, tokens, b["prompt_tokens"])) / t
    received = 2 * arch.num_layers * 2 * tokens * arch.hidden_size * COMPUTE_BYTES * (t - 1) / t
    return _phase(chip, flops, 0, [(t, 1, received, 2 * arch.num_layers)])


def _decode(plan: Plan, arch: Arch, config, chip: Chip) -> Phase:
    b, t = plan.batch, plan.meshes["rollout"]["tensor"]
    per_replica = math.ceil(b["sequences"] / b["replicas"])
    busy = min(b["slots"], per_replica)
    steps = math.ceil(per_replica / b["slots"]) * b["response_tokens"]
    context = b["prompt_tokens"] + b["response_tokens"] / 2
    kv = 1 if config.rollout.kv == "int8" else COMPUTE_BYTES
    weights = 1 if config.rollout.weights == "int8" else COMPUTE_BYTES
    read = matrix_params(arch) * weights + busy * context * _kv_bytes(arch) * kv / COMPUTE_BYTES
    flops = 2 * matrix_params(arch) * busy + attention_flops(arch, busy, context)
    received = 2 * arch.num_layers * 2 * busy * arch.hidden_size * COMPUTE_BYTES * (t - 1) / t
    return _phase(chip, flops / t, read / t, [(t, 1, received, 2 * arch.num_layers)]).times(steps)


def _publish(plan: Plan, chip: Chip) -> Phase:
    """What a device needs of the rollout's weights less what it holds of them: least where the shards nest."""
    copies = {n: size for n, size in plan.phase_bytes.get("generating", {}).items() if n.startswith("rollout weights")}
    needed, t = sum(copies.values()), plan.meshes["rollout"]["tensor"]
    received = max(needed - needed * t / plan.num_devices, 0)
    group = plan.num_devices // t
    return _phase(chip, 0, 0, [(max(group, 2 if received else 1), t, received, 1)])
