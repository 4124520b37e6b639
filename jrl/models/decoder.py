"""One decoder for every dense family (Llama 1 to 3, Qwen2, Qwen2.5, Qwen3), chosen by an `Arch`.

The block is written once, for one layer; its weights are stacked on axis 0 and `jax.lax.scan` walks over them, so that
compile time does not grow with depth. The same forward serves learner, prefill and decode: only the attention call is
plugged in (`attend`), which is why the rollout's logprobs are the learner's.

Letters: d data shards (or replicas), t tokens of a shard, D hidden, H query heads, J key-value heads, K head size,
F gated-MLP width, V vocabulary, L layers. Every row of tokens is `[d, t]`: what is a sequence and what is not is known
to `positions` and `attend` alone, so callers may lay out prompts, responses or decode slots as they like.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jrl.errors import UserError
from jrl.models.arch import Arch
from jrl.sharding.offload import near

Params = dict[str, Any]
# (layer i32[], q [d, t, H, K], k [d, t, J, K], v [d, t, J, K], cache) -> (out [d, t, H, K], cache)
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
Constrain = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]
Split = Any  # `jrl.sharding.fsdp.FullySharded`, or None: every weight lies as it is worked with

MASTER_DTYPE = jnp.float32
QUANTIZED_DTYPE = jnp.int8
LAYER_INPUT = "layer_input"
# What a layer keeps for its backward pass, "none" apart, which keeps all; the rest is computed again.
REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    # As full, but what is kept, the layer's input, waits in the host's memory.
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[LAYER_INPUT], offload_src="device", offload_dst="pinned_host"
    ),
}


def unconstrained(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """The `Constrain` of a single device: nothing to say."""
    del axes
    return x


def weight(shape: tuple[int, ...], axes: tuple[str, ...], init: Callable, rngs: nnx.Rngs, dtype: Any = MASTER_DTYPE) -> nnx.Param:
    """A weight: its shape, dtype, logical axes and initialiser, in one place."""
    return nnx.Param(init(rngs.params(), shape, MASTER_DTYPE).astype(dtype), axes=axes)


def flat_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [..., a] times w [a, b], as one product of two matrices: the weight's gradient is then one too.

    With the leading axes kept, XLA on CPU transposes the gradient's operands in the loop that makes them, at a quarter of
    the whole backward pass.
    """
    return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], w.shape[-1])


def with_input(integers: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """Both as they are; but XLA cannot take the integers' conversion out of a loop over x, and keep the larger copy meanwhile."""
    return jax.lax.optimization_barrier((integers, x))


class Linear(nnx.Module):
    """y = x W + b, W stored as [in, out], with a leading axis of layers when it is stacked.

    Args:
      int8: W is made of 8-bit integers and a scale f32[out] (`jrl.models.quantize`), which is applied to the product.
    """

    def __init__(
        self, stack: tuple[int, ...], sizes: tuple[int, int], axes: tuple[str, str], bias: bool, rngs: nnx.Rngs,
        int8: bool = False,
    ):  # fmt: skip
        layers, dtype = ("layers",) * len(stack), QUANTIZED_DTYPE if int8 else MASTER_DTYPE
        self.kernel = weight((*stack, *sizes), (*layers, *axes), nnx.initializers.normal(0.02), rngs, dtype)
        self.scale = weight((*stack, sizes[1]), (*layers, axes[1]), nnx.initializers.ones, rngs) if int8 else None
        self.bias = weight((*stack, sizes[1]), (*layers, axes[1]), nnx.initializers.zeros, rngs) if bias else None

    def __call__(self, x: jax.Array, split: Split = None) -> jax.Array:
        """With `split`, W lies split and is gathered for this product alone, and once more for its gradient."""
        if split is None:
            y = flat_matmul(x, self.kernel[...].astype(x.dtype))
        else:
            axes = self.kernel.get_metadata("axes")[-2:]
            y = jax.checkpoint(lambda x, w: flat_matmul(x, split.whole(w, axes)), prevent_cse=False)(x, self.kernel[...])
        if self.scale is not None:
            y = (y * self.scale[...]).astype(x.dtype)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, in float32 whatever the compute dtype (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, stack: tuple[int, ...], size: int, axis: str, eps: float, rngs: nnx.Rngs):
        self.scale = weight((*stack, size), (("layers",) * len(stack)) + (axis,), nnx.initializers.ones, rngs)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(MASTER_DTYPE)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        return self.scale[...].astype(x.dtype) * y.astype(x.dtype)


class Block(nnx.Module):
    """Pre-norm attention and gated MLP; weights carry `stack` leading axes, the call sees one layer."""

    def __init__(self, arch: Arch, stack: tuple[int, ...], rngs: nnx.Rngs, int8: bool):
        a, self.arch = arch, arch
        linear = functools.partial(Linear, stack, rngs=rngs, int8=int8)
        q_size, kv_size = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        self.attn_norm = RMSNorm(stack, a.hidden_size, "norm", a.rms_norm_eps, rngs)
        self.q = linear((a.hidden_size, q_size), ("embed", "heads"), a.qkv_bias)
        self.k = linear((a.hidden_size, kv_size), ("embed", "kv_heads"), a.qkv_bias)
        self.v = linear((a.hidden_size, kv_size), ("embed", "kv_heads"), a.qkv_bias)
        self.o = linear((q_size, a.hidden_size), ("heads", "embed"), a.o_bias)
        self.q_norm = RMSNorm(stack, a.head_dim, "head_dim", a.rms_norm_eps, rngs) if a.qk_norm else None
        self.k_norm = RMSNorm(stack, a.head_dim, "head_dim", a.rms_norm_eps, rngs) if a.qk_norm else None
        self.mlp_norm = RMSNorm(stack, a.hidden_size, "norm", a.rms_norm_eps, rngs)
        self.gate = linear((a.hidden_size, a.intermediate_size), ("embed", "mlp"), a.mlp_bias)
        self.up = linear((a.hidden_size, a.intermediate_size), ("embed", "mlp"), a.mlp_bias)
        self.down = linear((a.intermediate_size, a.hidden_size), ("mlp", "embed"), a.mlp_bias)

    def __call__(self, layer, x, rotation, attend: Attend, cache, constrain: Constrain, split: Split):
        a, (d, t, _) = self.arch, x.shape
        y = self.attn_norm(x)
        # Else the rotation would choose how the products lie, and with them the weights: TPUs would copy those of all layers.
        q, k, v = jax.lax.optimization_barrier((self.q(y, split), self.k(y, split), self.v(y, split)))
        q = q.reshape(d, t, a.num_heads, a.head_dim)  # [d, t, H, K]
        k = k.reshape(d, t, a.num_kv_heads, a.head_dim)  # [d, t, J, K]
        v = v.reshape(d, t, a.num_kv_heads, a.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = constrain(rotate(q, *rotation), ("batch", "length", "act_heads", None))
        k = constrain(rotate(k, *rotation), ("batch", "length", "act_kv_heads", None))
        v = constrain(v, ("batch", "length", "act_kv_heads", None))
        out, cache = attend(layer, q, k, v, cache)
        x = x + self.o(out.reshape(d, t, -1), split)
        x = constrain(x, ("batch", "length", "act_embed"))
        y = self.mlp_norm(x)
        y = constrain(jax.nn.silu(self.gate(y, split)) * self.up(y, split), ("batch", "length", "act_mlp"))
        x = constrain(x + self.down(y, split), ("batch", "length", "act_embed"))
        return x, cache


class Embedding(nnx.Module):
    """One row a token; in 8-bit integers with a scale f32[V], as in `Linear`."""

    def __init__(self, sizes: tuple[int, int], rngs: nnx.Rngs, int8: bool):
        dtype = QUANTIZED_DTYPE if int8 else MASTER_DTYPE
        self.embedding = weight(sizes, ("vocab", "embed"), nnx.initializers.normal(0.02), rngs, dtype)
        self.scale = weight(sizes[:1], ("vocab",), nnx.initializers.ones, rngs) if int8 else None

    def __call__(self, tokens: jax.Array, dtype, split: Split = None) -> jax.Array:
        if split is not None:
            return split.rows(self.embedding[...], ("vocab", "embed"), tokens)
        rows = jnp.take(self.embedding[...], tokens, axis=0)  # [d, t, D]
        if self.scale is not None:
            rows = rows * jnp.take(self.scale[...], tokens, axis=0)[..., None]
        return rows.astype(dtype)


class Decoder(nnx.Module):
    """Embedding, scanned blocks, final norm; the head is separate, because callers apply it in chunks."""

    def __init__(self, arch: Arch, rngs: nnx.Rngs, with_head: bool = True, int8: bool = False):
        self.arch = arch
        self.embed = Embedding((arch.vocab_size, arch.hidden_size), rngs, int8)
        self.layers = Block(arch, (arch.num_layers,), rngs, int8)
        self.final_norm = RMSNorm((), arch.hidden_size, "norm", arch.rms_norm_eps, rngs)
        untied = with_head and not arch.tie_embeddings
        sizes = (arch.hidden_size, arch.vocab_size), ("embed", "vocab")
        self.lm_head = Linear((), *sizes, False, rngs, int8) if untied else None

    def __call__(self, tokens, positions, attend, cache, *, dtype, constrain, remat, split, one_by_one=()):
        x = constrain(self.embed(tokens, dtype, split), ("batch", "length", "act_embed"))
        rotation = rotation_tables(self.arch, positions, dtype)
        block_def, stacked = nnx.split(self.layers)

        # Where nothing is computed again, gathered matrices would be kept of all layers: one matrix is whole at a time.
        one_matrix = split if remat == "none" else None
        gather = functools.partial(_whole, split, but_matrices=one_matrix is not None)

        def one_layer(carry, layer_and_weights):
            layer, weights = layer_and_weights
            x, weights = checkpoint_name(carry[0], LAYER_INPUT), near(weights)
            if split is not None:  # here, inside of the scan and of what is computed again: one layer is whole at a time
                weights = jax.tree.map(gather, weights, is_leaf=lambda p: isinstance(p, nnx.Variable))
            return nnx.merge(block_def, weights)(layer, x, rotation, attend, carry[1], constrain, one_matrix), None

        if one_by_one:
            for layer, weights in enumerate(one_by_one):
                if self.embed.scale is not None:
                    weights, x = with_input(weights, x)
                (x, cache), _ = one_layer((x, cache), (jnp.int32(layer), _filled(stacked, weights)))
            return self.final_norm(x), cache
        if remat != "none":
            one_layer = jax.checkpoint(one_layer, policy=REMAT_POLICIES[remat], prevent_cse=False)
        (x, cache), _ = jax.lax.scan(one_layer, (x, cache), (jnp.arange(self.arch.num_layers), stacked))
        return self.final_norm(x), cache


Int8Decoder = functools.partial(Decoder, int8=True)  # the same model, its matrices quantized: to generate, not to train


class Critic(nnx.Module):
    """A decoder whose head is one number per token: the value of the state after reading it.

    Args:
      head: a module of somebody's own, `head(arch, rngs)`, that makes [...] of hidden states [..., D]; None: a linear one.
    """

    def __init__(self, arch: Arch, rngs: nnx.Rngs, bias: bool = True, head: Callable | None = None):
        self.backbone = Decoder(arch, rngs, with_head=False)
        self.value = head(arch, rngs) if head else Linear((), (arch.hidden_size, 1), ("norm", "norm"), bias, rngs)


@functools.cache
def critic_with(head: Callable | None) -> Callable:
    """`Critic` with that head, the same object each time."""
    return functools.partial(Critic, head=head) if head else Critic


RewardModel = functools.partial(Critic, bias=False)  # its head is that of `transformers`' sequence classifiers


# Rotary position embedding (https://arxiv.org/abs/2104.09864), halves convention -----------------------------------


def inverse_frequencies(arch: Arch) -> jax.Array:
    """float32[K/2]: radians per token of each pair of channels, after the model's scaling for long contexts."""
    inv = 1.0 / arch.rope_theta ** (jnp.arange(0, arch.head_dim, 2, dtype=jnp.float32) / arch.head_dim)
    s = arch.rope_scaling
    if s is None:
        return inv
    if s.kind == "linear":
        return inv / s.factor
    # Llama 3: long wavelengths are slowed by `factor`, short ones kept, those between blended.
    turns = s.original_max_position * inv / (2 * jnp.pi)
    smooth = jnp.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0)
    return inv * ((1 - smooth) / s.factor + smooth)


def rotation_tables(arch: Arch, positions: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """cos and sin, each [d, t, 1, K/2], computed in float32."""
    angles = positions[..., None, None].astype(jnp.float32) * inverse_frequencies(arch)
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates channel i with channel i + K/2 of x [d, t, heads, K]."""
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


# Pure functions over the parameter dict ------------------------------------------------------------------------------


@functools.cache
def _split(cls: Callable, arch: Arch):
    return nnx.split(nnx.eval_shape(lambda: cls(arch, nnx.Rngs(0))))


def _filled(state, values: Params):
    """A copy of a module's state with these values in place of its own."""
    state = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(state, values)
    return state


def _module(cls: Callable, arch: Arch, params: Params):
    graph, abstract = _split(cls, arch)
    return nnx.merge(graph, _filled(abstract, params))


def abstract_params(arch: Arch, cls: Callable = Decoder) -> Params:
    """The parameter dict as `jax.ShapeDtypeStruct`s."""
    return nnx.to_pure_dict(_split(cls, arch)[1])


def param_axes(arch: Arch, cls: Callable = Decoder) -> Params:
    """The parameter dict with each weight's tuple of logical axis names."""
    state = _split(cls, arch)[1]
    axes = jax.tree.map(_axes_of, state, is_leaf=lambda p: isinstance(p, nnx.Variable))
    return nnx.to_pure_dict(axes)


def _axes_of(p: nnx.Variable) -> tuple[str, ...]:
    """A weight that states none, of a head of somebody's own, lies whole on every device."""
    return p.get_metadata().get("axes", ("norm",) * len(p.shape))


def init_params(arch: Arch, seed: int, layout=None, cls: type = Decoder) -> Params:
    """Random parameters, made in place on their devices when a `jrl.sharding.layout.Layout` is given."""
    shardings = None if layout is None else layout.tree(param_axes(arch, cls), abstract_params(arch, cls))

    def make():
        return nnx.to_pure_dict(nnx.state(cls(arch, nnx.Rngs(seed))))

    return jax.jit(make, out_shardings=shardings)()


def forward(
    arch: Arch,
    params: Params,
    tokens: jax.Array,  # i32[d, t]
    positions: jax.Array,  # i32[d, t]
    attend: Attend,
    cache: Any = (),
    *,
    dtype=MASTER_DTYPE,
    constrain: Constrain = unconstrained,
    remat: str = "none",
    split: Split = None,
) -> tuple[jax.Array, Any]:
    """The final hidden states [d, t, D] in `dtype`, and the cache as the attention calls left it.

    Weights are read as they lie; those that lie in a train layout of several devices through `split`.

    `params` may be those of `Decoder` or of `Int8Decoder`; so in `logits`. Those of the layers may lie in host memory: each
    layer's are brought when it is reached. With `params["layers"]` a tuple
    (`jrl.models.unstack`) the layers are written out instead of scanned, and `remat` is of no effect.
    """
    one_by_one = params["layers"] if isinstance(params["layers"], tuple) else ()
    kind = Int8Decoder if "scale" in params["embed"] else Decoder
    model = _module(kind, arch, {k: v for k, v in params.items() if k != "layers"} if one_by_one else params)
    return model(
        tokens, positions, attend, cache, dtype=dtype, constrain=constrain, remat=remat, split=split, one_by_one=one_by_one
    )


def _whole(split, param: nnx.Variable, but_matrices: bool) -> nnx.Variable:
    if but_matrices and param[...].ndim == 2:
        return param
    return param.replace(split.whole(param[...], param.get_metadata("axes")[1:]))


def head(arch: Arch, params: Params, split: Split) -> Callable[[jax.Array], jax.Array]:
    """float32 logits [d, t, V] of hidden states [d, t, D], as a function that may be called many times for one gradient."""
    if split is None:
        return functools.partial(logits, arch, params)
    if arch.tie_embeddings:
        return split.product(params["embed"]["embedding"], ("vocab", "embed"), contract=1)
    return split.product(params["lm_head"]["kernel"], ("embed", "vocab"), contract=0)


def logits(arch: Arch, params: Params, hidden: jax.Array) -> jax.Array:
    """float32 logits [..., V] of hidden states [..., D]."""
    head = params["embed"] if arch.tie_embeddings else params["lm_head"]
    kernel, dims = (head["embedding"], "td,vd->tv") if arch.tie_embeddings else (head["kernel"], "td,dv->tv")
    flat = hidden.reshape(-1, hidden.shape[-1])
    if "scale" in head:
        kernel, flat = with_input(kernel, flat)
    out = jnp.einsum(dims, flat, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32)
    if "scale" in head:
        out = out * head["scale"]
    return out.reshape(*hidden.shape[:-1], -1)


def value_head(params: Params, hidden: jax.Array, arch: Arch, head: Callable | None = None) -> jax.Array:
    """float32 values [...] of hidden states [..., D]; `params` is that of `Critic` or `RewardModel`.

    Raises:
      UserError: a head of somebody's own returns another shape.
    """
    w, hidden = params["value"], hidden.astype(jnp.float32)
    if head is None:
        # Accelerators would round both sides to fewer bits, and returns differ by little.
        values = jnp.matmul(hidden, w["kernel"], precision=jax.lax.Precision.HIGHEST)
        return values[..., 0] + w["bias"][0] if "bias" in w else values[..., 0]
    values = _module(head, arch, w)(hidden)
    if values.shape != hidden.shape[:-1]:
        raise UserError(
            f"config.critic.head: {getattr(head, '__name__', head)} makes {values.shape} of hidden states {hidden.shape};"
            " return one value for each, [...] of [..., D]"
        )
    return values.astype(jnp.float32)


def critic_from_policy(arch: Arch, params: Params, bias: bool = True, head: Callable | None = None, seed: int = 0) -> Params:
    """A critic whose backbone is a copy of the policy's and whose value head is zero, so that values start at 0.

    Without `bias` these are the parameters of `RewardModel`. A `head` of somebody's own starts as it initialises itself.
    """
    copy = {k: jax.tree.map(jnp.copy, v) for k, v in params.items() if k != "lm_head"}
    if head:
        return {"backbone": copy, "value": nnx.to_pure_dict(nnx.state(head(arch, nnx.Rngs(seed))))}
    d = arch.hidden_size
    return {"backbone": copy, "value": {"kernel": jnp.zeros((d, 1))} | ({"bias": jnp.zeros((1,))} if bias else {})}
