import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jrl.errors import UserError
from jrl.sharding.layout import Layout


@pytest.fixture(scope="module")
def train():
    return Layout.train({"data": 2, "fsdp": 2, "tensor": 2})


@pytest.fixture(scope="module")
def rollout():
    return Layout.rollout({"replica": 4, "tensor": 2})


def test_weights_and_activations_follow_the_tables(train, rollout):
    expected = {
        ("vocab", "embed"): (P("tensor", "fsdp"), P("tensor")),
        ("layers", "embed", "heads"): (P(None, "fsdp", "tensor"), P(None, None, "tensor")),
        ("layers", "embed", "kv_heads"): (P(None, "fsdp", "tensor"), P(None, None, "tensor")),
        ("layers", "mlp", "embed"): (P(None, "tensor", "fsdp"), P(None, "tensor")),
        ("layers", "norm"): (P(), P()),
        ("layers", "head_dim"): (P(), P()),
        ("batch", "length", "act_embed"): (P(("data", "fsdp")), P("replica")),
        ("batch", "length", "act_heads", None): (P(("data", "fsdp"), None, "tensor"), P("replica", None, "tensor")),
        ("batch", "length", "act_vocab"): (P(("data", "fsdp"), None, "tensor"), P("replica", None, "tensor")),
    }
    for axes, (on_train, on_rollout) in expected.items():
        assert train.spec(axes) == on_train, axes
        assert rollout.spec(axes) == on_rollout, axes
    assert rollout.spec(("batch", "pages", None, "act_kv_heads", None)) == P("replica", None, None, "tensor")
    assert (train.batch_shards, rollout.batch_shards) == (4, 4)


def test_mesh_axes_of_size_one_are_left_out():
    layout = Layout.train({"fsdp": 8})
    assert layout.spec(("batch",)) == P("fsdp")
    assert layout.spec(("vocab", "embed")) == P(None, "fsdp")
    assert Layout.train({}, jax.devices()[:1]).spec(("vocab", "embed")) == P()


def test_shards_have_the_size_that_the_names_promise(train):
    x = jax.device_put(jnp.zeros((6, 4, 10)), train.sharding(("layers", "embed", "mlp"), (6, 4, 10)))
    assert {s.data.shape for s in x.addressable_shards} == {(6, 2, 5)}


def test_kv_heads_that_do_not_divide_are_whole_on_every_device(rollout):
    axes, whole = ("batch", "length", "act_kv_heads", None), P("replica")
    assert rollout.sharding(axes, (4, 1, 6, 8)).spec == P("replica", None, "tensor")
    assert rollout.sharding(axes, (4, 1, 1, 8)).spec == rollout.sharding(axes, (4, 1, 3, 8)).spec == whole
    with pytest.raises(UserError, match="'act_heads' of size 3"):  # control: query heads have to divide
        rollout.sharding(("batch", "length", "act_heads", None), (4, 1, 3, 8))


def test_tree_places_each_leaf(train):
    axes = {"a": {"kernel": ("embed", "mlp")}, "n": ("norm",)}
    shapes = {"a": {"kernel": jax.ShapeDtypeStruct((4, 6), jnp.float32)}, "n": np.zeros(3)}
    shardings = train.tree(axes, shapes)
    assert shardings["a"]["kernel"].spec == P("fsdp", "tensor")
    assert shardings["n"].spec == P()
    shapes["a"]["kernel"] = jax.ShapeDtypeStruct((4, 5), jnp.float32)
    with pytest.raises(UserError, match=r"a/kernel: .*'mlp' of size 5 does not divide into 2 parts \(tensor=2\)"):
        train.tree(axes, shapes)


@pytest.mark.parametrize(
    ("axes", "shape", "message"),
    [
        (("embed", "hidden"), None, r"no logical axis is called 'hidden'; the table has .*embed"),
        (("slots",), None, r"no logical axis is called 'slots'"),  # the train table has none
        (("mlp", "heads"), None, r"both 'mlp' and 'heads' on mesh axis 'tensor'"),
        (("batch", "embed"), None, r"both 'batch' and 'embed' on mesh axis 'fsdp'"),
        (("batch", "length"), (6, 3), r"'batch' of size 6 does not divide into 4 parts \(data=2 fsdp=2\).*divides 6"),
        (("embed", "mlp"), (4, 4, 4), r"3 dimensions"),
    ],
)
def test_bad_axes_are_one_readable_line(train, axes, shape, message):
    with pytest.raises(UserError, match=message) as error:
        train.sharding(axes, shape)
    assert "\n" not in str(error.value)


def test_constrain_places_an_intermediate(train):
    def placed(x):
        return train.constrain(x * 2, ("batch", "act_mlp"))

    x = jnp.arange(32.0).reshape(8, 4)
    y = jax.jit(placed)(jax.device_put(x, train.sharding((None, None))))
    np.testing.assert_array_equal(y, 2 * x)
    assert y.sharding.is_equivalent_to(train.sharding(("batch", "act_mlp")), 2)
    with pytest.raises(UserError, match="'batch' of size 6"):
        jax.jit(placed)(jnp.zeros((6, 4)))


def test_constrain_is_nothing_on_one_device(train):
    one = Layout.train({}, jax.devices()[:1])

    def count(layout):
        return str(jax.make_jaxpr(lambda x: layout.constrain(x, ("batch",)))(jnp.zeros(4))).count("sharding_constraint")

    assert count(one) == 0
    assert count(train) == 1  # control: the same function does constrain elsewhere


def test_layouts_are_equal_and_hash_by_value():
    a, b = Layout.train({"fsdp": 8}), Layout.train({"fsdp": -1})
    assert a == b and hash(a) == hash(b)
    assert a != Layout.train({"tensor": 8})
