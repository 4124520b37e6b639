"""Operations counted in a jaxpr against counts by hand."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jrl.plan.flops import matmul_flops

A, B, C, N, L = 4, 6, 10, 3, 5
x, w = jnp.ones((N, A, B)), jnp.ones((L, B, B))


def flops(f, *args):
    return matmul_flops(jax.make_jaxpr(f)(*args))


def test_products_by_hand():
    assert flops(lambda x: jnp.einsum("nab,bc->nac", x, jnp.ones((B, C))), x) == 2 * N * A * B * C
    assert flops(lambda x: jnp.einsum("nab,ncb->nac", x, jnp.ones((N, C, B))), x) == 2 * N * A * B * C
    assert flops(lambda x: x + 1, x) == 0


def test_loops_branches_and_gradients():
    def scanned(x, w):
        return jax.lax.scan(lambda x, w: (jax.jit(jnp.tanh)(x @ w), None), x, w)[0].sum()

    forward = L * 2 * N * A * B * B
    assert flops(scanned, x, w) == forward
    assert flops(jax.grad(scanned, argnums=(0, 1)), x, w) == 3 * forward
    again = jax.checkpoint(lambda x, w: jnp.tanh(jnp.tanh(x @ w) @ w))
    plain = jax.grad(lambda w: again(x, w).sum())
    assert flops(plain, w[0]) > flops(jax.grad(lambda w: jnp.tanh(jnp.tanh(x @ w) @ w).sum()), w[0])
    branch = lambda x: jax.lax.cond(x.sum() > 0, lambda x: x @ w[0] @ w[0], lambda x: x @ w[0], x)  # noqa: E731
    assert flops(branch, x) == 2 * 2 * N * A * B * B
    loop = lambda x: jax.lax.while_loop(lambda x: x.sum() > 0, lambda x: x @ w[0], x)  # noqa: E731
    assert flops(loop, x) == 2 * N * A * B * B


def test_a_shard_map_counts_on_every_device():
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    split = jax.shard_map(lambda x: x @ w[0], mesh=mesh, in_specs=PartitionSpec(None, "d"), out_specs=PartitionSpec(None, "d"))
    assert flops(split, x) == 2 * N * A * B * B
