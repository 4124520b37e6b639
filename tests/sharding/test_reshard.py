import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrl.errors import UserError
from jrl.sharding import reshard as reshard_module
from jrl.sharding.digest import digest
from jrl.sharding.exchange import exchange
from jrl.sharding.layout import Layout
from jrl.sharding.reshard import reshard

AXES = {
    "embed": ("vocab", "embed"),
    "q": {"kernel": ("layers", "embed", "heads"), "bias": ("layers", "heads")},
    "o": ("layers", "heads", "embed"),
    "norm": ("layers", "norm"),
}


def host_tree() -> dict:
    rng = np.random.default_rng(0)
    shapes = {"embed": (48, 16), "q": {"kernel": (2, 16, 24), "bias": (2, 24)}, "o": (2, 24, 16), "norm": (2, 16)}
    return jax.tree.map(lambda s: rng.standard_normal(s, np.float32), shapes, is_leaf=lambda s: isinstance(s, tuple))


def place(layout: Layout) -> dict:
    values = host_tree()
    return jax.device_put(values, layout.tree(AXES, values))


def same_memory(a: jax.Array, b: jax.Array) -> bool:
    pairs = zip(a.addressable_shards, b.addressable_shards, strict=True)
    return all(x.data.unsafe_buffer_pointer() == y.data.unsafe_buffer_pointer() for x, y in pairs)


def check(moved: dict, layout: Layout) -> None:
    jax.tree.map(np.testing.assert_array_equal, moved, host_tree())
    wanted = layout.tree(AXES, moved)
    assert jax.tree.map(lambda x: x.sharding, moved) == wanted


@pytest.mark.parametrize(
    ("train", "rollout"),
    [
        ({"fsdp": 8}, {"replica": 4, "tensor": 2}),
        ({"fsdp": 4, "tensor": 2}, {"replica": 4, "tensor": 2}),
        ({"fsdp": 2, "tensor": 4}, {"replica": 4, "tensor": 2}),
        ({"data": 2, "fsdp": 2, "tensor": 2}, {"replica": 8}),
        ({"tensor": 8}, {"tensor": 8}),
    ],
)
def test_values_survive_the_way_there_and_back(train, rollout):
    source, target = Layout.train(train), Layout.rollout(rollout)
    params = place(source)
    there = reshard(params, target.tree(AXES, params))
    check(there, target)
    check(reshard(there, source.tree(AXES, params)), source)


def test_equal_placement_shares_memory_and_nothing_else_does():
    source, target = Layout.train({"fsdp": 4, "tensor": 2}), Layout.rollout({"replica": 4, "tensor": 2})
    params = place(source)
    moved = reshard(params, target.tree(AXES, params))
    shared = jax.tree.map(same_memory, params, moved)
    assert shared == {"embed": False, "q": {"kernel": False, "bias": True}, "o": False, "norm": True}
    assert moved["norm"].sharding.mesh == target.mesh  # though it has not moved, it belongs to the rollout mesh
    cast = reshard(params, target.tree(AXES, params), jnp.bfloat16)
    assert not any(jax.tree.leaves(jax.tree.map(same_memory, params, cast)))


def test_one_device_moves_nothing():
    one = jax.devices()[:1]
    params = place(Layout.train({}, one))
    target = Layout.rollout({}, one)
    assert all(jax.tree.leaves(jax.tree.map(same_memory, params, reshard(params, target.tree(AXES, params)))))


def test_floats_are_cast_and_integers_are_not():
    source, target = Layout.train({"fsdp": 8}), Layout.rollout({"tensor": 8})
    w = jax.device_put(np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8), source.sharding(("embed", "mlp")))
    count = jax.device_put(np.arange(8, dtype=np.int32), source.sharding(("batch",)))
    shardings = {"w": target.sharding((None, "mlp")), "count": target.sharding(("mlp",))}
    moved = reshard({"w": w, "count": count}, shardings, jnp.bfloat16)
    assert (moved["w"].dtype, moved["count"].dtype) == (jnp.bfloat16, jnp.int32)
    np.testing.assert_array_equal(moved["w"], np.asarray(w).astype(jnp.bfloat16))
    np.testing.assert_array_equal(moved["count"], np.arange(8))


def test_a_second_call_compiles_nothing():
    source, target = Layout.train({"fsdp": 2, "tensor": 4}), Layout.rollout({"replica": 2, "tensor": 4})
    params = place(source)
    shardings = target.tree(AXES, params)
    exchange.cache_clear()
    reshard(params, shardings)
    reshard(place(source), shardings)
    info = exchange.cache_info()
    assert (info.misses, info.hits) == (3, 3)  # the other two share memory


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("train", {"fsdp": 4}, slice(0, 4)), ("rollout", {"replica": 2, "tensor": 2}, slice(4, 8))),
        (("train", {"fsdp": 2, "tensor": 2}, slice(0, 4)), ("rollout", {"tensor": 4}, slice(4, 8))),
        (("train", {"fsdp": 2}, slice(0, 2)), ("rollout", {"replica": 2, "tensor": 3}, slice(2, 8))),
        (("train", {"fsdp": 2}, slice(0, 2)), ("rollout", {"replica": 1, "tensor": 4}, slice(4, 8))),
        (("train", {"fsdp": 8}, slice(0, 8)), ("rollout", {"replica": 2}, slice(2, 4))),
        (("rollout", {"replica": 1}, slice(7, 8)), ("train", {"fsdp": 4, "tensor": 2}, slice(0, 8))),
    ],
)
def test_other_devices(source, target):
    layouts = [getattr(Layout, kind)(sizes, jax.devices()[devices]) for kind, sizes, devices in (source, target)]
    params = place(layouts[0])
    check(reshard(params, layouts[1].tree(AXES, params)), layouts[1])


def test_same_devices_in_another_order():
    x = jax.device_put(np.arange(64.0).reshape(8, 8), Layout.train({"fsdp": 8}).sharding(("embed", None)))
    backwards = NamedSharding(Mesh(np.array(jax.devices())[::-1], ("x",)), P(None, "x"))
    np.testing.assert_array_equal(reshard(x, backwards), np.arange(64.0).reshape(8, 8))


def test_bad_input_is_refused_before_anything_moves(monkeypatch):
    layout = Layout.train({"fsdp": 8})
    tree = {"good": jnp.zeros((8, 8)), "odd": jnp.zeros((8, 6))}
    monkeypatch.setattr(reshard_module, "_move", None)  # reaching it would raise TypeError
    with pytest.raises(UserError, match=r"odd of shape \(8, 6\) does not divide"):
        reshard(tree, layout.sharding((None, "embed")))
    with pytest.raises(UserError, match="one structure"):
        reshard(tree, {"good": layout.sharding((None, "embed"))})


def test_sync_proof():
    """The digest of the published weights equals that of the masters, cast; one skipped sync and it does not."""
    source, target = Layout.train({"fsdp": 4, "tensor": 2}), Layout.rollout({"replica": 4, "tensor": 2})
    params = place(source)
    shardings = target.tree(AXES, params)
    published = reshard(params, shardings, jnp.bfloat16)
    for _ in range(2):
        assert digest(params, jnp.bfloat16) == digest(published)
        params = jax.jit(lambda p: jax.tree.map(lambda x: x * 1.01, p))(params)
        assert digest(params, jnp.bfloat16) != digest(published)  # a skipped sync
        published = reshard(params, shardings, jnp.bfloat16)
    assert digest(params, jnp.bfloat16) == digest(published)
