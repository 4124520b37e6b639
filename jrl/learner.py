"""The jitted update: loss -> gradients, summed over microbatches -> one optax step.

Policy and critic learn through the same `Learner`; they differ in the loss they are handed. A loss sees one microbatch
and returns a sum already divided by the minibatch's global denominators, so the gradient does not depend on how the
minibatch was split over microbatches or devices.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrl.models import decoder
from jrl.models.arch import Arch
from jrl.models.responses import by_response, response_hidden, token_logprobs
from jrl.packing import Packed, pack, unpack
from jrl.shapes import ProgramLog
from jrl.sharding.fsdp import FullySharded
from jrl.sharding.hosts import fetch, put
from jrl.sharding.layout import Layout
from jrl.sharding.memory_kinds import DEVICE, HOST
from jrl.sharding.offload import Optimizer, near, placed, update_from_host
from jrl.types import Sequences


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything an update changes. One pytree, donated to each update."""

    params: Any
    opt_state: Any
    step: jax.Array  # i32[], updates applied
    skipped: jax.Array  # i32[], updates left out because the gradient was not finite


@dataclasses.dataclass(frozen=True)
class Forward:
    """How a model is run: everything static about a forward pass but the weights."""

    arch: Arch
    layout: Layout
    dtype: Any
    remat: str
    temperature: float
    logit_chunk: int
    value_head: Callable | None = None  # of a critic, see `jrl.models.decoder.Critic`

    def logprobs(self, params, packed: Packed) -> tuple[jax.Array, jax.Array]:
        """Log-probabilities of the response tokens and entropies, float32[d, N, t] each, 0 after a response's end."""
        return self.predictions(params, packed)[:2]

    def predictions(self, params, packed: Packed) -> tuple[jax.Array, jax.Array, jax.Array]:
        """These, and 1 where the token is the likeliest one, else 0."""
        # Of a model in host memory only the layers can wait until they are reached.
        params = params | near({name: weights for name, weights in params.items() if name != "layers"})
        hidden = self._hidden(params, packed)
        layout = self.layout
        logprobs, entropy, likeliest = token_logprobs(
            self.arch, params, hidden, packed.tokens, self.temperature, self.logit_chunk, layout.constrain,
            split=self._split(), parts=layout.shards("length"),
        )  # fmt: skip
        place = functools.partial(by_response, packed=packed, constrain=layout.constrain)
        return place(logprobs), place(entropy), place(likeliest)

    def values(self, params, packed: Packed) -> jax.Array:
        """The critic's values float32[d, N, t]: what is expected before each response token is chosen."""
        values = decoder.value_head(params, self._hidden(params["backbone"], packed), self.arch, self.value_head)
        return by_response(values, packed, self.layout.constrain)

    def _hidden(self, params, packed):
        return response_hidden(
            self.arch, params, packed, dtype=self.dtype, layout=self.layout, split=self._split(), remat=self.remat
        )  # fmt: skip

    def _split(self) -> FullySharded | None:
        return FullySharded(self.layout, self.dtype) if self.layout.mesh.size > 1 else None


# (sequences, columns, rows, shards, microbatch_tokens, parts) -> microbatches: `jrl.packing.pack` or `pack_rows`
Packing = Callable[[Sequences, dict[str, np.ndarray], np.ndarray, int, int, int], Iterator[Packed]]

# (forward, params, packed) -> (loss, metrics): both sums over the microbatch with the minibatch's denominators
Loss = Callable[[Forward, Any, Packed], tuple[jax.Array, dict[str, jax.Array]]]


def make_optimizer(section, total_updates: int) -> tuple[Optimizer, optax.Schedule]:
    """AdamW behind a clip of the global norm, and its schedule, which counts updates rather than steps.

    Args:
      section: config.learner or config.critic.
      total_updates: when "linear" and "cosine" reach 0.
    """
    peak, warmup = section.learning_rate, section.warmup_steps
    rest = max(total_updates - warmup, 1)
    schedule = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, 0.0, rest),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest),
    }[section.schedule]()
    if warmup:
        schedule = optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), schedule], [warmup])
    adamw = optax.adamw(schedule, b1=section.beta1, b2=section.beta2, eps=section.eps, weight_decay=section.weight_decay)
    chain = optax.chain(optax.clip_by_global_norm(section.max_grad_norm), adamw)
    return Optimizer(chain.init, chain.update, adamw, section.max_grad_norm), schedule


class Learner:
    """Runs and trains one model on its mesh.

    Args:
      layout: `jrl.sharding.layout.Layout` of the train mesh.
      model: `decoder.Decoder` or `decoder.Critic`, which says how parameters are laid out.
      loss: see `Loss`; None for a model that is only run, as the reference.
      optimizer, schedule: from `make_optimizer`; None likewise.
      microbatch_tokens: padded tokens of one forward pass, per data shard.
      packing: how sequences become microbatches.
      param_memory: `DEVICE`, or for a model that is only run `HOST`; where the parameters are kept.
      optimizer_memory: `DEVICE` or `HOST`; where Adam's moments are kept.
    """

    def __init__(self, name: str, forward: Forward, layout, model: Callable, microbatch_tokens: int, loss: Loss | None = None,
                 optimizer: Any = None, schedule: Any = None, packing: Packing = pack, param_memory: str = DEVICE,
                 optimizer_memory: str = DEVICE):  # fmt: skip
        self.forward, self.layout, self.microbatch_tokens, self.packing = forward, layout, microbatch_tokens, packing
        self.compiled = ProgramLog(name)
        shapes = self._param_shapes = decoder.abstract_params(forward.arch, model)
        axes = decoder.param_axes(forward.arch, model)
        self.param_shardings = placed(layout.tree(axes, shapes), param_memory)
        self._stacked = [names[0] == "layers" for names in jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))]
        self.optimizer, self.schedule, self.optimizer_memory = optimizer, schedule, optimizer_memory
        self._run = jax.jit(lambda method, params, packed: getattr(forward, method)(params, packed), static_argnums=0)
        if loss is not None:
            self.state_shardings = self._state_shardings(shapes)
            self._zeros = jax.jit(
                lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), out_shardings=self.param_shardings
            )
            self._accumulate = jax.jit(
                functools.partial(_accumulate, forward, loss), donate_argnums=1, out_shardings=(self.param_shardings, None)
            )
            self._measure = jax.jit(lambda params, packed: loss(forward, params, packed)[1])
            self._norm = jax.jit(optax.global_norm)
            self._apply = jax.jit(self._apply_gradients, donate_argnums=0, out_shardings=self.state_shardings)

    # State ---------------------------------------------------------------------------------------------------------

    def _state_shardings(self, shapes) -> TrainState:
        abstract = jax.eval_shape(self.optimizer.init, shapes)
        scalar = self.layout.sharding(())
        # Adam's moments are laid out as their weights, every counter is replicated.
        moments = placed(self.param_shardings, self.optimizer_memory)
        opt = optax.tree_map_params(self.optimizer, lambda _, s: s, abstract, moments, transform_non_params=lambda _: scalar)
        return TrainState(self.param_shardings, opt, scalar, scalar)

    def init_state(self, params) -> TrainState:
        """A fresh state around parameters already on this learner's mesh."""
        init = jax.jit(self.optimizer.init, out_shardings=self.state_shardings.opt_state)
        scalar = lambda: put(np.int32(0), self.state_shardings.step)  # noqa: E731
        return TrainState(params, init(params), scalar(), scalar())

    def abstract_params(self):
        """Shapes, dtypes and shardings of the parameters."""
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), self._param_shapes, self.param_shardings
        )

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of a state, for restoring one."""
        params = self.abstract_params()
        state = jax.eval_shape(lambda p: TrainState(p, self.optimizer.init(p), jnp.int32(0), jnp.int32(0)), params)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, self.state_shardings)

    def abstract_programs(self, packed: Packed) -> dict[str, tuple[Any, tuple]]:
        """The jitted programs of an update on a microbatch of `jax.ShapeDtypeStruct`s, and their arguments."""
        state = self.abstract_state()
        return {
            "update": (self._accumulate, (state.params, state.params, packed)),
            "norm": (self._norm, (state.params,)),
            "apply": (self._apply, (state, state.params)),
        }

    def abstract_run(self, method: str, packed: Packed) -> tuple[Any, tuple]:
        """Likewise of `run`."""
        return self._run, (method, self.abstract_params(), packed)

    # Running -------------------------------------------------------------------------------------------------------

    def _microbatches(self, rollout: Sequences, columns: dict, rows: np.ndarray, kind: str) -> Iterator[tuple[Packed, Packed]]:
        parts = self.layout.shards("length")
        for packed in self.packing(rollout, columns, rows, self.layout.batch_shards, self.microbatch_tokens, parts):
            self.compiled.note(kind, *packed.shape)
            yield packed, put(packed, self.layout.tree(packed.axes, packed))

    def run(self, method: str, params, rollout: Sequences) -> list[np.ndarray]:
        """`Forward.logprobs` or `Forward.values` over a whole rollout, aligned with its tokens: float32[N, T] each.

        The packing must be `pack` or `pack_groups`.
        """
        outs: list[np.ndarray] = []
        for host, packed in self._microbatches(rollout, {}, np.arange(len(rollout)), method):
            results = fetch(jax.tree.leaves(self._run(method, params, packed)))
            outs = outs or [np.zeros(rollout.tokens.shape, np.float32) for _ in results]
            for out, result in zip(outs, results, strict=True):
                unpack(out, result, host, rollout.prompt_lens)
        return outs

    # Learning ------------------------------------------------------------------------------------------------------

    def measure(self, params, sequences: Sequences, columns: dict[str, np.ndarray], rows: np.ndarray) -> dict[str, float]:
        """The loss's metrics of the sequences `rows`, without an update; `columns` as in `update`."""
        totals = None
        for _, packed in self._microbatches(sequences, columns, rows, "measure"):
            sums = self._measure(params, packed)
            totals = sums if totals is None else jax.tree.map(jnp.add, totals, sums)
        return {k: float(v) for k, v in jax.device_get(totals or {}).items()}

    def update(self, state: TrainState, rollout: Sequences, columns: dict[str, np.ndarray], rows: np.ndarray):
        """One optimizer step on the sequences `rows`.

        Args:
          state: donated.
          columns: f32[N, T] arrays that the loss reads; "weight" is the share of each token in the loss.

        Returns:
          the new state and a dict of float metrics.
        """
        gradients, totals = self._zeros(), None
        for _, packed in self._microbatches(rollout, columns, rows, "update"):
            gradients, sums = self._accumulate(state.params, gradients, packed)
            totals = sums if totals is None else jax.tree.map(jnp.add, totals, sums)
        norm = float(self._norm(gradients))
        metrics = {k: float(v) for k, v in jax.device_get(totals or {}).items()}
        metrics |= {"grad_norm": norm, "lr": float(self.schedule(state.step)), "skipped": 0.0 if np.isfinite(norm) else 1.0}
        # Decided on the host: a choice inside the program would keep old and new state side by side.
        step = self._apply if np.isfinite(norm) else self._skip
        return jax.block_until_ready(step(state, gradients)), metrics  # so that timers tell the truth

    def _apply_gradients(self, state: TrainState, gradients) -> TrainState:
        if self.optimizer_memory == HOST:
            params, opt_state = update_from_host(self.optimizer, gradients, state.opt_state, state.params, self._stacked)
        else:
            updates, opt_state = self.optimizer.update(gradients, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, state.step + 1, state.skipped)

    def _skip(self, state: TrainState, _gradients) -> TrainState:
        return dataclasses.replace(state, skipped=state.skipped + 1)


def _accumulate(forward: Forward, loss: Loss, params, gradients, packed: Packed):
    backward: Any
    value, backward, metrics = jax.vjp(lambda p: loss(forward, p, packed), params, has_aux=True)
    # Each weight's gradient is added to the sum as it is made, layer by layer, so that no second set of gradients need exist.
    # (Where weights are copied, along data, XLA for TPUs makes one all the same, to sum all layers' over the copies at once.)
    sums = jax.tree.map(jax.new_ref, gradients)
    backward.with_refs(sums)(jnp.ones_like(value))
    return jax.tree.map(jax.freeze, sums), metrics
