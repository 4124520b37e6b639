"""The planner at the service of a run: `config.plan="auto"`, and the refusal of what cannot fit."""

import logging
import os

import jax
from ml_collections import ConfigDict

from jrl.errors import UserError
from jrl.models.arch import Arch
from jrl.models.load import read_arch
from jrl.plan.chips import Chip, chip_of
from jrl.plan.plan import Plan, size_text
from jrl.plan.search import search

log = logging.getLogger("jrl")

ESTIMATE = "estimate"  # in the names of bytes that are one


def resolve(config) -> ConfigDict:
    """The config itself, or where it says `plan="auto"` a copy with meshes, microbatch, remat and slots chosen.

    Raises:
      UserError: the model fits this machine in no way.
    """
    if config.plan != "auto":
        return config
    chip = this_chip(jax.devices())
    choice = search(config, read_arch(config.model.path), chip, len(jax.devices()), keep=1)[0]
    settings = " ".join(f"{name}={value}" for name, value in choice.settings.items())
    log.info("plan for %d x %s: %s", len(jax.devices()), chip.name, settings)
    return choice.applied(config)


def this_chip(devices: list[jax.Device]) -> Chip:
    """The chip of these devices; what is not in the table is taken for one as slow as a CPU, with the memory that it says."""
    known = chip_of(devices[0])
    if known is not None:
        return known
    platform = devices[0].platform
    memory = _device_bytes_of_cpu() if platform == "cpu" else (devices[0].memory_stats() or {}).get("bytes_limit", 0)
    if not memory:
        raise UserError(f"config.plan=auto: a device of kind {devices[0].device_kind!r} is not known; set the meshes instead")
    # Rates in the proportions of a CPU with two cores; only the proportions matter to a choice.
    return Chip(platform, platform, 4e11, memory, 2e10, 1e10, 0, 0, None, 1e9, len(devices))


def refuse_what_cannot_fit(plan: Plan, arch: Arch, devices: list[jax.Device]) -> None:
    """Raises UserError where what is counted exactly exceeds a device's memory; estimates alone make a warning."""
    known = chip_of(devices[0])
    memory = known.hbm_bytes if known else _device_bytes_of_cpu() if devices[0].platform == "cpu" else None
    if memory is None:
        return
    phase, needed = plan.most_needed(lambda name: ESTIMATE not in name)
    far = sum(plan.host_bytes.values()) if devices[0].platform == "cpu" else 0  # there it is the same memory
    needed += far
    if needed > memory:
        raise UserError(
            f"config.model.path: {arch.num_params() / 1e6:,.0f} M parameters need {size_text(needed)} on each device while"
            f" {phase}, before activations, and it has {size_text(memory)}; take more devices, split over more of them"
            " (learner.mesh.fsdp, rollout.mesh.tensor), or lower rollout.slots; --dry_run shows the bytes"
        )
    if plan.peak_bytes + far > memory:
        text = size_text(plan.peak_bytes + far)
        log.warning("memory: about %s may be needed on each device, which has %s", text, size_text(memory))


def _device_bytes_of_cpu() -> float:
    """The host's memory, shared by this process's devices."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / jax.local_device_count()
