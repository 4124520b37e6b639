"""Learners of small models on any mesh, batches for them, and their compiled programs."""

import dataclasses
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from jrl.config import default_config, with_preset
from jrl.learner import Forward, Learner, make_optimizer
from jrl.losses import policy_columns, policy_loss
from jrl.models import decoder
from jrl.models.load import RANDOM
from jrl.plan.aot import main_text, topology_devices
from jrl.plan.programs import abstract_packed
from jrl.sharding.layout import Layout
from jrl.types import Completion, Rollout, make_rollout

TEMPERATURE = 0.7
ARCH = dataclasses.replace(RANDOM["tiny"], family="qwen2", qkv_bias=True, tie_embeddings=False, max_position=8192)
OPTIMIZER = ConfigDict(
    {"learning_rate": 1e-3, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.99,
     "eps": 1e-8, "max_grad_norm": 1.0}
)  # fmt: skip
ALGORITHM = with_preset(default_config()).algorithm
ALGORITHM.entropy_coef = 0.01


def one_device() -> Layout:
    return Layout.train({}, jax.devices()[:1])


def make_learner(layout=None, arch=ARCH, dtype=jnp.float32, remat="full", temperature=TEMPERATURE, logit_chunk=32,
                 microbatch_tokens=512, loss=None, **options):  # fmt: skip
    layout = layout or one_device()
    forward = Forward(arch, layout, dtype, remat, temperature, logit_chunk)
    return Learner(
        "policy", forward, layout, decoder.Decoder, microbatch_tokens, loss or policy_loss(ALGORITHM),
        *make_optimizer(OPTIMIZER, 10), **options,
    )  # fmt: skip


def make_params(layout=None, arch=ARCH):
    """Weights far enough from zero that every part of the model matters."""
    params = jax.tree.map(lambda x: x + 0.25 * jax.random.normal(jax.random.key(x.size), x.shape), decoder.init_params(arch, 0))
    return params if layout is None else jax.device_put(params, layout.tree(decoder.param_axes(arch), params))


def random_batch(prompt_lens: tuple[int, ...], samples: int, longest: int, seed: int = 0) -> tuple[Rollout, dict]:
    """A rollout of random tokens, responses of many lengths, and what the loss reads beside it."""
    rng, done, prompts = np.random.default_rng(seed), [], []
    for request, size in enumerate(prompt_lens):
        prompts.append(rng.integers(3, 260, size).astype(np.int32))
        for sample in range(samples):
            n = int(rng.integers(1, longest + 1))
            logprobs = -rng.random(n).astype(np.float32)
            tokens = rng.integers(3, 260, n).astype(np.int32)
            done.append(Completion(request, sample, tokens, logprobs, logprobs, np.zeros(n, np.int32), "length"))
    rollout = make_rollout(prompts, done)
    mask = rollout.loss_mask
    share = (mask / mask.sum()).astype(np.float32)
    advantages = rng.standard_normal(mask.shape).astype(np.float32) * mask
    return rollout, {"weight": share, "share": share, "advantages": advantages, "rollout_logprobs": rollout.logprobs}


def updated(layout, batch, arch=ARCH, **options):
    """The state after one update of fresh weights, and its metrics."""
    learner = make_learner(layout, arch, **options)
    rollout, columns = batch
    return learner.update(learner.init_state(make_params(layout, arch)), rollout, columns, np.arange(len(rollout)))


def assert_same_update(a, b, rtol=1e-4):
    """Loss, entropy and norm of the gradient agree, and so do both of Adam's moments, which are the gradient and its square."""
    (state_a, metrics_a), (state_b, metrics_b) = a, b
    for name in ("pg_loss", "entropy", "grad_norm"):
        assert metrics_a[name] == pytest.approx(metrics_b[name], rel=rtol, abs=1e-7), name
    # Adam's first step is lr * sign(g): gradients near zero may differ, so moments are compared, not steps.
    moments = [jax.tree.leaves(s.opt_state)[1:-1] for s in (state_a, state_b)]
    for x, y in zip(*moments, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-7)


def compiled(learner, sizes, program="update"):
    """One of an update's programs for microbatches of sizes (P, u, N, t), and its text."""
    packed = abstract_packed(learner.layout, sizes, policy_columns(ALGORITHM))
    jitted, args = learner.abstract_programs(packed)[program]
    with tempfile.TemporaryDirectory() as folder:  # a TPU's executable cannot always give its text back
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        executable = jitted.lower(*args).compile(compiler_options=options)
        return executable, main_text(folder)


def tpu_devices(topology):
    """Chips that programs can be compiled for; without the TPU compiler the test is skipped."""
    pytest.importorskip("libtpu", reason="the TPU compiler is in the extra `aot`")
    return topology_devices(topology)
