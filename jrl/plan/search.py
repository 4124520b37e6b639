"""Chooses meshes, microbatch, remat and slots for a model, a batch and a number of chips: the fastest plan that fits.

Learner and rollout share devices but not time, so either side's choices are costed alone and the pairs are joined by
memory: what both hold all the time, and the larger of what either needs besides.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from jrl.config import override
from jrl.errors import UserError
from jrl.models.arch import Arch
from jrl.plan.chips import Chip
from jrl.plan.cost import StepCost, step_cost
from jrl.plan.plan import Plan, make_plan, size_text
from jrl.sharding.mesh import TRAIN_AXES

USABLE_SHARE = 0.92  # of a chip's memory: the rest is the runtime's, and for what no model foresees
REMAT = ("none", "dots", "full")
SLOTS = (8, 16, 32, 64, 128, 256, 512)
MAX_TENSOR = 32


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to run: the keys to set, and what comes of them."""

    settings: dict[str, Any]  # key of the config -> value
    plan: Plan
    cost: StepCost

    @property
    def seconds(self) -> float:
        """By which choices are compared: between the bounds."""
        return (self.cost.hidden_seconds + self.cost.exposed_seconds) / 2

    def applied(self, config) -> ConfigDict:
        """A copy of the config with the settings made."""
        return _changed(config, self.settings)

    def to_dict(self) -> dict[str, Any]:
        """For json."""
        return {"settings": self.settings, "plan": self.plan.to_dict(), "cost": self.cost.to_dict()}


@dataclasses.dataclass(frozen=True)
class _Side:
    """Learner or rollout alone."""

    settings: dict[str, Any]
    seconds: float  # of a step, the rollout's with publishing
    publish_seconds: float
    held: int
    phase: int


@dataclasses.dataclass(frozen=True)
class Apart:
    """Learner and rollout on devices of their own, both at work all the time, the rollout's weights one step behind."""

    learner_devices: int
    rollout_devices: int
    settings: dict[str, Any]
    seconds: float  # of a step: the slower side, and publishing

    def to_dict(self) -> dict[str, Any]:
        """For json."""
        return dataclasses.asdict(self)


def search(config, arch: Arch, chip: Chip, num_devices: int, keep: int = 5) -> list[Choice]:
    """The best choices with learner and rollout on the same devices, fastest first.

    Args:
      config: validated; its batch, algorithm and precision are kept, meshes, microbatch, remat and slots chosen.

    Raises:
      UserError: nothing fits; it says what the smallest needs.
    """
    limit = int(chip.hbm_bytes * USABLE_SHARE)
    learners, rollouts = (list(_sides(config, arch, chip, num_devices, rollout)) for rollout in (False, True))
    if not learners or not rollouts:
        raise UserError(
            f"no mesh of {num_devices} devices suits {config.model.path} with {config.rollout.prompts_per_step} prompts x"
            f" {config.rollout.group_size}: its heads, MLP and hidden size must divide; choose another number of devices"
        )
    needs = lambda pair: sum(side.held for side in pair) + max(side.phase for side in pair)  # noqa: E731
    pairs = sorted(itertools.product(learners, rollouts), key=lambda pair: sum(side.seconds for side in pair))
    choices: list[Choice] = []
    for learner, rollout in itertools.islice((pair for pair in pairs if needs(pair) <= limit), 4 * keep):
        choice = choose(config, arch, chip, num_devices, learner.settings | rollout.settings)
        if choice.plan.peak_bytes <= limit:
            choices.append(choice)
    if not choices:
        raise UserError(
            f"{config.model.path} does not fit {num_devices} x {chip.name}: the leanest choice needs"
            f" {size_text(min(map(needs, pairs)))} of {size_text(limit)} usable on a device; take more devices, or lower"
            " rollout.max_new_tokens"
        )
    return sorted(choices, key=lambda c: c.seconds)[:keep]


def search_apart(config, arch: Arch, chip: Chip, num_devices: int) -> Apart | None:
    """The best split of the devices, in quarters, into learner and rollout; None where no split fits."""
    limit = int(chip.hbm_bytes * USABLE_SHARE)
    found = []
    for learner_devices in (num_devices * quarters // 4 for quarters in (1, 2, 3)):
        rollout_devices = num_devices - learner_devices
        best = [
            min(
                (s for s in _sides(config, arch, chip, n, rollout) if s.held + s.phase <= limit),
                key=lambda s: s.seconds, default=None,
            )
            for n, rollout in ((learner_devices, False), (rollout_devices, True)) if n
        ]  # fmt: skip
        if len(best) == 2 and (learner := best[0]) and (rollout := best[1]):
            seconds = max(learner.seconds, rollout.seconds - rollout.publish_seconds) + rollout.publish_seconds
            found.append(Apart(learner_devices, rollout_devices, learner.settings | rollout.settings, seconds))
    return min(found, key=lambda apart: apart.seconds, default=None)


def _changed(config, settings: dict[str, Any]) -> ConfigDict:
    changed = ConfigDict(config).copy_and_resolve_references()
    for name, value in settings.items():
        override(changed, name, value)
    return changed


def choose(config, arch: Arch, chip: Chip, num_devices: int, settings: dict[str, Any]) -> Choice:
    """The choice of these settings.

    Raises:
      UserError: the model or the batch does not suit the meshes.
    """
    changed = _changed(config, settings)
    plan = make_plan(changed, arch, num_devices, chip.backend)
    return Choice(settings, plan, step_cost(plan, arch, changed, chip))


def _sides(config, arch: Arch, chip: Chip, num_devices: int, rollout: bool) -> Iterator[_Side]:
    """What the learner, or the rollout, may choose on so many devices."""
    phase = "generating" if rollout else "updating"
    for settings in (_rollout_settings if rollout else _learner_settings)(config, num_devices):
        # The other side is as plain as can be; only this side's numbers are read.
        plain = _plain_learner(num_devices) if rollout else {"rollout.mesh.replica": -1, "rollout.mesh.tensor": 1}
        try:
            choice = choose(config, arch, chip, num_devices, plain | settings)
        except UserError:
            continue  # the model does not divide so
        plan, phases = choice.plan, choice.cost.phases
        seconds = {name: (p.hidden_seconds + p.exposed_seconds) / 2 for name, p in phases.items()}
        yield _Side(
            settings,
            sum(s for name, s in seconds.items() if name.startswith(("generate", "publish")) == rollout),
            seconds["publish"],
            sum(n for name, n in plan.held_bytes.items() if name.startswith("rollout") == rollout),
            max(sum(parts.values()) for name, parts in plan.phase_bytes.items() if name.startswith(phase)),
        )


def _plain_learner(num_devices: int) -> dict[str, Any]:
    return {f"learner.mesh.{axis}": num_devices if axis == "fsdp" else 1 for axis in TRAIN_AXES}


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _learner_settings(config, num_devices: int) -> Iterator[dict[str, Any]]:
    r = config.rollout
    longest = config.data.max_prompt_tokens + r.max_new_tokens
    groups = r.prompts_per_step // config.algorithm.minibatches
    for sizes in _factorizations(num_devices, len(TRAIN_AXES)):
        mesh = dict(zip(TRAIN_AXES, sizes, strict=True))
        shards = mesh["data"] * mesh["fsdp"]
        if shards > groups or mesh["tensor"] > MAX_TENSOR:
            continue
        whole = -(-groups // shards) * (config.data.max_prompt_tokens + r.group_size * r.max_new_tokens)
        budgets = {min(longest * 2**i, whole) for i in range((whole // longest).bit_length() + 1)}
        for budget, remat in itertools.product(sorted(budgets), REMAT):
            keys = {f"learner.mesh.{axis}": size for axis, size in mesh.items()}
            yield {**keys, "learner.microbatch_tokens": budget, "learner.remat": remat}


def _factorizations(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ordered ways to write n as a product of so many factors."""
    if parts == 1:
        yield (n,)
        return
    for first in _divisors(n):
        for rest in _factorizations(n // first, parts - 1):
            yield (first, *rest)


def _rollout_settings(config, num_devices: int) -> Iterator[dict[str, Any]]:
    sequences = config.rollout.prompts_per_step * config.rollout.group_size
    for tensor in (t for t in _divisors(num_devices) if t <= MAX_TENSOR):
        per_replica = -(-sequences // (num_devices // tensor))
        for slots in sorted({min(n, per_replica) for n in SLOTS}):
            yield {"rollout.mesh.replica": num_devices // tensor, "rollout.mesh.tensor": tensor, "rollout.slots": slots}
