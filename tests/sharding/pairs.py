"""Every weight of a whole dense model from a train mesh to a rollout mesh, and what the compiled programs say of it.

`python -m tests.sharding.pairs 64 16x4:8x8 ...` does it on so many virtual devices and prints a JSON list.
"""

import collections
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jrl.models import decoder
from jrl.models.arch import Arch
from jrl.sharding.digest import digest
from jrl.sharding.hlo import collective_bytes, received_bytes
from jrl.sharding.layout import Layout, path_name
from jrl.sharding.reshard import exchanges, reshard

# Untied head, biases, grouped heads: every kind of weight. Layers 0.2 to 1.6 MiB in float32.
ARCH = Arch(
    family="qwen2", vocab_size=768, hidden_size=128, intermediate_size=384, num_layers=4, num_heads=32, num_kv_heads=16,
    head_dim=8, rope_theta=1e4, rope_scaling=None, rms_norm_eps=1e-6, tie_embeddings=False, qkv_bias=True, o_bias=False,
    mlp_bias=False, qk_norm=False, max_position=64,
)  # fmt: skip
CHUNK_BYTES = 96 * 1024  # less than most shards, so that there are loops

# fsdp x tensor, or data x fsdp x tensor -> replica x tensor. Ours do not nest unless tensor stays as it is.
PAIRS = {
    8: ["8x1:8x1", "8x1:4x2", "8x1:2x4", "8x1:1x8", "4x2:8x1", "4x2:4x2", "4x2:2x4", "2x4:4x2", "2x4:1x8", "1x8:2x4",
        "2x2x2:2x4", "2x4x1:4x2"],
    16: ["16x1:8x2", "8x2:4x4", "4x4:8x2", "4x4:2x8", "2x8:4x4", "2x4x2:4x4", "16x1:1x16", "4x2x2:16x1"],
    64: ["64x1:8x8", "64x1:16x4", "16x4:8x8", "16x4:32x2", "16x4:16x4", "8x8:16x4", "2x8x4:8x8", "4x16x1:32x2"],
}  # fmt: skip


def sizes(pair: str) -> tuple[dict[str, int], dict[str, int]]:
    train, rollout = ([int(n) for n in side.split("x")] for side in pair.split(":"))
    return dict(zip(("data", "fsdp", "tensor")[-len(train) :], train, strict=True)), dict(
        zip(("replica", "tensor"), rollout, strict=True)
    )


def layouts(pair: str) -> tuple[Layout, Layout]:
    train, rollout = sizes(pair)
    return Layout.train(train), Layout.rollout(rollout)


def placements(layout: Layout):
    return layout.tree(decoder.param_axes(ARCH), decoder.abstract_params(ARCH))


def host_params() -> dict:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), decoder.abstract_params(ARCH))


def least_bytes(shape, source, target, itemsize: int) -> np.ndarray:
    """Needed minus held, element by element: each device's two shards drawn into an array of the whole."""
    held, needed = source.devices_indices_map(shape), target.devices_indices_map(shape)
    missing = []
    for device in source.mesh.devices.flat:
        wanted = np.zeros(shape, bool)
        wanted[needed[device]] = True
        wanted[held[device]] = False
        missing.append(wanted.sum() * itemsize)
    return np.array(missing)


def examine(pair: str, dtype=jnp.bfloat16) -> dict:
    """One pair: bytes received and needed by device, temporary bytes, whether values and digests are right."""
    train, rollout = layouts(pair)
    host = host_params()
    params, targets = jax.device_put(host, placements(train)), placements(rollout)
    received, least = np.zeros((2, train.mesh.size), np.int64)
    temp, kinds = 0, collections.Counter()
    leaves = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    wanted = {path_name(path): s for path, s in jax.tree_util.tree_leaves_with_path(targets)}
    for name, program in exchanges(params, targets, dtype, CHUNK_BYTES).items():
        text = program.as_text()
        received += received_bytes(text)
        temp = max(temp, program.memory_analysis().temp_size_in_bytes)
        kinds.update({kind: traffic.count for kind, traffic in collective_bytes(text).items()})
        least += least_bytes(leaves[name].shape, leaves[name].sharding, wanted[name], jnp.dtype(dtype).itemsize)
    moved = reshard(params, targets, dtype, CHUNK_BYTES)
    equal = jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), b.astype(dtype)), moved, host)
    return {
        "pair": pair, "received": received.tolist(), "least": least.tolist(), "temp": temp, "collectives": kinds,
        "values": all(jax.tree.leaves(equal)), "digests": digest(params, dtype) == digest(moved),
        "placed": jax.tree.map(lambda a: a.sharding, moved) == targets,
    }  # fmt: skip


def examine_elsewhere(devices: int, pairs: list[str]) -> list[dict]:
    """`examine` in a process with another number of virtual devices."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={devices}")
    env = os.environ | {"XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.sharding.pairs", str(devices), *pairs]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


if __name__ == "__main__":
    assert jax.device_count() == int(sys.argv[1]), jax.device_count()
    print(json.dumps([examine(pair) for pair in sys.argv[2:]]))
