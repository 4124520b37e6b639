"""What a step made of the devices: the share of their peak arithmetic that the models needed, and the memory they held."""

import resource
import sys
from collections.abc import Sequence

import jax
import numpy as np

from jrl.models.arch import Arch
from jrl.plan.chips import chip_of
from jrl.plan.cost import attention_flops, matrix_params
from jrl.types import Rollout

GIB = 2**30


def forward_flops(arch: Arch, rollout: Rollout, head: bool = True) -> float:
    """Multiplications and additions of one forward pass over N sequences, each group's prompt once, attention causal.

    Args:
      head: with logits for all tokens; False for a critic.
    """
    prompts, responses = rollout.prompt_lens.astype(np.float64), rollout.response_lens.astype(np.float64)
    firsts = prompts[np.unique(rollout.group_ids, return_index=True)[1]]  # of each group
    tokens = firsts.sum() + responses.sum()
    pairs = (firsts * (firsts + 1) / 2).sum() + (responses * prompts + responses * (responses + 1) / 2).sum()
    return 2 * matrix_params(arch, head) * tokens + attention_flops(arch, 1, pairs)


def update_flops(arch: Arch, rollout: Rollout, epochs: int, taught: float) -> float:
    """Of the policy's updates: forward, and backward at twice that, of the share `taught` of the sequences.

    What is computed again to save memory does not count, as usual for model FLOPs (PaLM, arXiv:2204.02311, appendix B).
    """
    return 3 * epochs * taught * forward_flops(arch, rollout)


def other_flops(
    arch: Arch, sampled: Sequence[Rollout], rollout: Rollout, epochs: int, logprob_passes: int, critic: bool
) -> float:
    """Of the rest of a step: generating, logprobs of the policy before its update and of the reference, and the critic."""
    generated = sum(forward_flops(arch, each) for each in sampled)
    values = (1 + 3 * epochs) * forward_flops(arch, rollout, head=False) if critic else 0.0
    return generated + logprob_passes * forward_flops(arch, rollout) + values


def mfu(flops: float, seconds: float, devices: Sequence[jax.Device]) -> float | None:
    """Model FLOPs utilization: the share of the devices' bfloat16 peak; None where that is unknown, as for CPUs."""
    chip = chip_of(devices[0])
    return flops / (seconds * len(devices) * chip.flops) if chip and seconds > 0 else None


def max_memory_gb(devices: Sequence[jax.Device]) -> float:
    """The most GiB that any device has held since the process began; where devices do not count it, that were resident."""
    stats = [device.memory_stats() for device in devices]
    peaks = [found["peak_bytes_in_use"] for found in stats if found and "peak_bytes_in_use" in found]
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return max(peaks, default=resident) / GIB
