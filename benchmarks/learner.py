"""One update of the policy, by the learner and by the naive ways; prints one JSON report.

python benchmarks/learner.py --model DIR_OR_GGUF --prompt-tokens 256 --completion-tokens 64 --lengths uniform
"""

import dataclasses
import time

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrl import platform
from jrl.config import default_config, with_preset
from jrl.learner import Forward, Learner, make_optimizer
from jrl.losses import policy_columns, policy_loss
from jrl.models import decoder
from jrl.models.load import load_model
from jrl.models.responses import by_response, response_hidden
from jrl.packing import Packed, pack
from jrl.plan.programs import abstract_packed
from jrl.sharding.layout import Layout
from jrl.types import Completion, Rollout, make_rollout

COLUMNS = policy_columns(with_preset(default_config()).algorithm)


class WholeLogits(Forward):
    """A forward that holds the logits of all response tokens at once."""

    def logprobs(self, params, packed: Packed) -> tuple[jax.Array, jax.Array]:
        hidden = response_hidden(
            self.arch, params, packed, dtype=self.dtype, layout=self.layout, split=None, remat=self.remat
        )  # fmt: skip
        logits = jax.nn.log_softmax(decoder.head(self.arch, params, None)(hidden) / self.temperature)
        logprobs = jnp.take_along_axis(logits, packed.tokens[..., None], axis=-1)[..., 0]
        entropy = -jnp.sum(jnp.exp(logits) * logits, axis=-1)
        return by_response(logprobs, packed, self.layout.constrain), by_response(entropy, packed, self.layout.constrain)


def make_batch(args, vocabulary: int) -> Rollout:
    """Random tokens; lengths all alike, or most of them an eighth of what the longest has (one in each group)."""
    rng, done, prompts = np.random.default_rng(0), [], []
    for request in range(args.prompts):
        prompts.append(rng.integers(3, vocabulary, args.prompt_tokens).astype(np.int32))
        for sample in range(args.group):
            long = args.lengths == "uniform" or sample == 0
            n = args.completion_tokens if long else max(int(args.completion_tokens * rng.uniform(0.06, 0.19)), 1)
            logprobs = -rng.random(n).astype(np.float32)
            tokens = rng.integers(3, vocabulary, n).astype(np.int32)
            done.append(Completion(request, sample, tokens, logprobs, logprobs, np.zeros(n, np.int32), "length"))
    return make_rollout(prompts, done)


def columns_of(rollout: Rollout) -> dict[str, np.ndarray]:
    """What GRPO's loss reads, with advantages that differ within a group."""
    mask = rollout.loss_mask
    share = (mask / mask.sum()).astype(np.float32)
    sequences = (mask / np.maximum(mask.sum(1, keepdims=True), 1) / len(rollout)).astype(np.float32)
    advantages = np.random.default_rng(1).standard_normal((len(rollout), 1)).astype(np.float32) * mask
    return {
        "share": share, "sequence_share": sequences, "weight": share, "advantages": advantages,
        "rollout_logprobs": rollout.logprobs,
    }  # fmt: skip


def make_learner(forward: Forward, config) -> Learner:
    loss, optimizer = policy_loss(config.algorithm), make_optimizer(config.learner, 100)
    return Learner("policy", forward, forward.layout, decoder.Decoder, config.learner.microbatch_tokens, loss, *optimizer)


def temporaries_mib(learner: Learner, args, tokens: int) -> float:
    """Of the compiled pass over `tokens` padded response tokens, in rows of `completion_tokens`."""
    rows = tokens // args.completion_tokens
    sizes = (-(-rows // args.group), args.prompt_tokens, rows, args.completion_tokens)
    packed = abstract_packed(learner.layout, sizes, COLUMNS)
    program, arguments = learner.abstract_programs(packed)["update"]
    return round(program.lower(*arguments).compile().memory_analysis().temp_size_in_bytes / 2**20, 1)


def difference(a, b) -> float:
    """Of two gradients, as Adam's first moments show them: the norm of what differs, of the norm of one."""
    first, second = (optax.tree_utils.tree_get(state.opt_state, "mu") for state in (a, b))
    norm = lambda tree: float(optax.global_norm(tree))  # noqa: E731
    return norm(jax.tree.map(jnp.subtract, first, second)) / norm(second)


def main() -> None:
    p = common.parser(__doc__.splitlines()[0])
    p.set_defaults(prompt_tokens=256, completion_tokens=64, microbatch_tokens=2560, steps=4)
    p.add_argument("--lengths", choices=("uniform", "long_tailed"), default="uniform", help="of completions")
    args = p.parse_args()
    config = with_preset(default_config())
    config.learner.microbatch_tokens = args.microbatch_tokens
    layout, dtype = Layout.train({}, jax.devices()[:1]), platform.compute_dtype("auto")
    model = load_model(args.model, layout)
    settings = (model.arch, layout, dtype, config.learner.remat, config.rollout.temperature, config.learner.logit_chunk)
    rollout = make_batch(args, model.arch.vocab_size)
    alone = dataclasses.replace(rollout, group_ids=np.arange(len(rollout), dtype=np.int32))
    learner, naive = make_learner(Forward(*settings), config), make_learner(WholeLogits(*settings), config)
    ways = {
        "jrl": (learner, rollout),
        "each sequence with its own prompt": (learner, alone),
        "that, and whole logits (naive)": (naive, alone),
    }
    columns, rows = columns_of(rollout), np.arange(len(rollout))
    states = {}
    for name, (way, batch) in ways.items():
        states[name], _ = way.update(way.init_state(jax.tree.map(jnp.copy, model.params)), batch, columns, rows)
    differs = {name: difference(state, states["that, and whole logits (naive)"]) for name, state in states.items()}
    state, seconds = states.popitem()[1], {name: [] for name in ways}
    states.clear()  # the ways take turns on one state
    for _ in range(args.steps):
        for name, (way, batch) in ways.items():
            began = time.perf_counter()
            state, _ = way.update(state, batch, columns, rows)
            seconds[name].append(time.perf_counter() - began)
    medians = {name: float(np.median(x)) for name, x in seconds.items()}
    sizes = {name: [m.shape for m in pack(batch, {}, rows, 1, args.microbatch_tokens)] for name, (_, batch) in ways.items()}
    counts = [args.completion_tokens * args.group * n for n in (1, 4)]
    common.emit(
        {
            "benchmark": "learner",
            "args": vars(args),
            "seconds": {name: common.spread(x) for name, x in seconds.items()},
            "naive_over_jrl": {name: round(x / medians["jrl"], 3) for name, x in medians.items()},
            "gradient_differs_from_naive": differs,
            "tokens": int(rollout.lens.sum()),
            "padded_tokens": {name: sum(p * u + r * t for p, u, r, t in x) for name, x in sizes.items()},
            "temporaries_mib": {
                name: {f"{n} response tokens": temporaries_mib(way, args, n) for n in counts}
                for name, way in (("jrl", learner), ("naive", naive))
            },
            "whole_logits_mib": {f"{n} response tokens": round(n * model.arch.vocab_size * 4 / 2**20, 1) for n in counts},
        },
        args.json,
    )


if __name__ == "__main__":
    main()
