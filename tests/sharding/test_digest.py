import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.sharding import digest as digest_module
from jrl.sharding.digest import digest
from jrl.sharding.layout import Layout

AXES = {"embed": ("vocab", "embed"), "layers": {"q": ("layers", "embed", "heads"), "norm": ("layers", "norm")}}


def tree(seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "embed": rng.standard_normal((48, 16), np.float32),
        "layers": {"q": rng.standard_normal((3, 16, 24), np.float32), "norm": rng.standard_normal((3, 16), np.float32)},
    }


def place(values: dict, layout: Layout) -> dict:
    return jax.device_put(values, layout.tree(AXES, values))


def murmur_final(h: int) -> int:
    h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
    h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
    return h ^ (h >> 16)


def reference(x: np.ndarray) -> int:
    """The formula in whole numbers of Python, element by element."""
    bits = x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize]).reshape(-1).tolist()
    return sum(murmur_final(b ^ murmur_final(i)) for i, b in enumerate(bits)) % 2**32


def test_equals_the_formula():
    x = tree()
    got = digest(jax.tree.map(jnp.asarray, x))
    assert got == {
        "embed": reference(x["embed"]),
        "layers/norm": reference(x["layers"]["norm"]),
        "layers/q": reference(x["layers"]["q"]),
    }


@pytest.mark.parametrize("chunk_elements", [1, 100, 2**18])
def test_same_on_every_layout(chunk_elements, monkeypatch):
    monkeypatch.setattr(digest_module, "CHUNK_ELEMENTS", chunk_elements)  # many chunks a shard, or one
    digest_module._program.cache_clear()
    values = tree()
    layouts = [
        Layout.train({}, jax.devices()[:1]),
        Layout.train({"fsdp": 4, "tensor": 2}),
        Layout.train({"data": 2, "fsdp": 2, "tensor": 2}),
        Layout.rollout({"replica": 1, "tensor": 8}),
    ]
    digests = [digest(place(values, layout)) for layout in layouts]
    assert all(d == digests[0] for d in digests)
    assert digests[0]["embed"] == reference(values["embed"])
    digest_module._program.cache_clear()


def changed(edit) -> bool:
    """Whether the digest sees an edit of embed[48, 16], on 8 devices; the rest of the tree must not change."""
    layout = Layout.train({"fsdp": 4, "tensor": 2})
    values = tree()
    before = digest(place(values, layout))
    edit(values["embed"])
    after = digest(place(values, layout))
    assert {k: v for k, v in before.items() if k != "embed"} == {k: v for k, v in after.items() if k != "embed"}
    return before["embed"] != after["embed"]


@pytest.mark.parametrize("bit", [0, 13, 31])
def test_sees_one_bit(bit):
    def flip(x):
        x.view(np.uint32)[5, 3] ^= np.uint32(1) << np.uint32(bit)

    assert changed(flip)


def swap(x, a, b):
    x[a], x[b] = x[b].copy(), x[a].copy()


def test_sees_elements_that_trade_places():
    assert changed(lambda x: swap(x, (0, 0), (47, 15)))
    assert not changed(lambda x: swap(x, (3, 3), (3, 3)))


def test_sees_a_number_and_its_negative_that_trade_places():
    x = tree()["embed"]
    x[0, 0], x[1, 0] = 1.0, -1.0
    before = digest(jnp.asarray(x))
    swap(x, (0, 0), (1, 0))
    assert digest(jnp.asarray(x)) != before


def test_sees_rows_that_trade_places():
    assert changed(lambda x: swap(x, 0, 47))


def test_other_dtypes_and_shapes():
    x = {
        "bf16": jnp.asarray([[1.5, -2.0]], jnp.bfloat16),
        "i8": jnp.asarray([-1, 3], jnp.int8),
        "bool": jnp.asarray([True, False]),
        "scalar": jnp.int32(7),
        "empty": jnp.zeros((0, 4)),
        "key": jax.random.split(jax.random.key(1), 3),
    }
    before = digest(x)
    assert before["scalar"] == murmur_final(7 ^ murmur_final(0))
    assert before["empty"] == 0
    assert before["bf16"] == reference(np.asarray(x["bf16"]))
    other = {
        "bf16": x["bf16"] * 2,
        "i8": x["i8"] + 1,
        "bool": ~x["bool"],
        "scalar": x["scalar"] + 1,
        "empty": x["empty"],
        "key": x["key"][::-1],
    }
    after = digest(other)
    assert {k for k in x if before[k] != after[k]} == set(x) - {"empty"}
    assert digest({}) == {}


def test_one_tree_may_lie_on_several_meshes():
    x = tree()["embed"]
    layouts = [
        Layout.train({"fsdp": 8}),
        Layout.rollout({"replica": 4, "tensor": 2}),
        Layout.rollout({"tensor": 2}, jax.devices()[4:6]),
    ]
    placed = {str(i): jax.device_put(x, layout.sharding(("vocab", "embed"))) for i, layout in enumerate(layouts)}
    assert set(digest({**placed, "unplaced": jnp.asarray(x)}).values()) == {reference(x)}


def test_cast_comes_first():
    layout = Layout.train({"fsdp": 8})
    values = {"w": np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8), "step": np.int32(3)}
    masters = jax.device_put(values, {"w": layout.sharding(("embed", "mlp")), "step": layout.sharding(())})
    published = {"w": masters["w"].astype(jnp.bfloat16), "step": masters["step"]}
    assert digest(masters, jnp.bfloat16) == digest(published)
    assert digest(masters) != digest(published)


def test_holds_one_chunk_and_gathers_nothing():
    layout = Layout.train({"fsdp": 4, "tensor": 2})
    sharding = layout.sharding(("vocab", "embed"))
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=sharding)
    compiled = digest_module._program((sharding,), None).lower([x]).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 4 * digest_module.CHUNK_ELEMENTS  # of 8 MiB a shard
    assert "all-gather" not in compiled.as_text()
