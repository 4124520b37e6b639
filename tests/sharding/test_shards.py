"""Weights as parts in host memory: each value is sent once, and whoever has all parts has the arrays, however they lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrl.sharding.shards import Shard, _region, from_shards, own_shards

FROM = [((2, 4), ("a", "b")), ((8,), ("a",)), ((2, 2, 2), ("a", "b", "c"))]
SPECS = [(), ("a",), (None, "a"), ("a", "b"), (("a", "b"),), (None, ("b", "a")), ("b",)]


def sharding(shape, names, spec, devices=None):
    mesh = Mesh(np.array(devices or jax.devices()).reshape(shape), names)
    known = lambda part: [x for x in ((part,) if isinstance(part, str) else part or ()) if x in names]  # noqa: E731
    return NamedSharding(mesh, PartitionSpec(*(tuple(known(part)) or None for part in spec)))


def tree_of():
    rng = np.random.default_rng(0)
    return {
        "w": rng.normal(size=(16, 24)).astype(np.float32), "half": jnp.asarray(rng.normal(size=(8, 8)), jnp.bfloat16),
        "layers": rng.normal(size=(8, 16, 4)).astype(np.float32), "scalar": np.float32(3.5),
    }  # fmt: skip


def placed(tree, shape, names, spec):
    at = {name: sharding(shape, names, spec if np.ndim(x) > 1 else ()) for name, x in tree.items()}
    return jax.device_put(tree, at), at


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(("shape", "names"), FROM, ids=str)
def test_parts_make_up_the_arrays_on_any_other_mesh(shape, names, spec):
    tree = tree_of()
    sent, _ = placed(tree, shape, names, spec)
    parts = own_shards(sent)
    for leaf, shards in zip(jax.tree.leaves(tree), parts, strict=True):  # once each, though some mesh axes only copy
        assert sum(shard.values.size for shard in shards) == np.size(leaf)
    # As from two processes, on half of the devices and otherwise cut.
    halves = [[shards[: len(shards) // 2] for shards in parts], [shards[len(shards) // 2 :] for shards in parts]]
    for spec_there in (("b", "a"), (), (None, ("a", "b"))):
        cut = lambda x: sharding((2, 2), ("a", "b"), spec_there if np.ndim(x) > 1 else (), jax.devices()[4:])  # noqa: E731, B023
        at = jax.tree.map(cut, tree)
        arrived = from_shards(halves[::-1], sent, at)
        for name, x in tree.items():
            assert arrived[name].sharding == at[name] and arrived[name].dtype == jnp.asarray(x).dtype
            np.testing.assert_array_equal(np.asarray(arrived[name]), np.asarray(x))


def test_a_missing_part_is_told():
    sent, at = placed(tree_of(), (2, 4), ("a", "b"), ("a", "b"))
    parts = own_shards(sent)
    parts[jax.tree.leaves({name: name for name in sent}).index("w")].pop()
    whole = {name: sharding((8,), ("a",), ()) for name in at}
    with pytest.raises(ValueError, match=r"of 384 values of an array of shape \(16, 24\), 336 have come"):
        from_shards([parts], sent, whole)


def test_what_is_cut_alike_is_not_copied():
    values = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    assert _region([Shard((3, 0), values)], (6, 4), (3, 0), (6, 4)) is values
    assert _region([Shard((3, 0), values)], (6, 4), (4, 0), (6, 2)).tolist() == [[4, 5], [8, 9]]
