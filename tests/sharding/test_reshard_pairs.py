"""The bound of resharding: whole models, (train mesh, rollout mesh) pairs over 8, 16 and 64 devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.sharding.hlo import received_bytes
from tests.sharding import pairs

EVERY_TIME = {"8x1:4x2", "4x2:2x4", "16x4:8x8"}  # none of them nests
CASES = [
    pytest.param(devices, pair, id=f"{devices}-{pair}", marks=() if pair in EVERY_TIME else pytest.mark.slow)
    for devices, table in pairs.PAIRS.items()
    for pair in table
]


@functools.cache
def elsewhere(devices: int, default: bool) -> dict[str, dict]:
    chosen = [pair for pair in pairs.PAIRS[devices] if (pair in EVERY_TIME) == default]
    return {report["pair"]: report for report in pairs.examine_elsewhere(devices, chosen)}


@pytest.mark.parametrize(("devices", "pair"), CASES)
def test_every_device_receives_what_it_needs_and_lacks(devices, pair):
    """Device by device, bytes received in the compiled programs are needed minus held, all weights taken together; what the
    programs take beside arguments and results is less than a chunk; and what arrives is what was sent."""
    report = pairs.examine(pair) if devices == jax.device_count() else elsewhere(devices, pair in EVERY_TIME)[pair]
    assert len(report["received"]) == devices
    np.testing.assert_array_equal(report["received"], report["least"])
    assert report["temp"] <= pairs.CHUNK_BYTES
    assert report["values"] and report["digests"] and report["placed"]
    assert sum(report["least"]) > 0 and sum(report["collectives"].values()) > 8  # there was something to send, in chunks


def test_the_partitioner_alone_exceeds_the_bound():
    """Control: the same weights by a jitted identity."""
    train, rollout = pairs.layouts("8x1:4x2")
    received, least, temp = np.zeros(8), np.zeros(8), 0
    shapes = jax.tree.leaves(pairs.decoder.abstract_params(pairs.ARCH))
    for leaf, a, b in zip(shapes, *(jax.tree.leaves(pairs.placements(side)) for side in (train, rollout)), strict=True):
        given = jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=a)
        compiled = jax.jit(lambda x: x, out_shardings=b).lower(given).compile()
        received += received_bytes(compiled.as_text())
        least += pairs.least_bytes(leaf.shape, a, b, 4)
        temp = max(temp, compiled.memory_analysis().temp_size_in_bytes)
    assert received.max() > 1.3 * least.max()
    assert temp > 5 * pairs.CHUNK_BYTES
