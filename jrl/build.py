"""Puts a run together from its config: data first, then the model, then what trains it and what generates from it."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrl import platform
from jrl.data import Prompt, PromptStream, distinct, encode, load_splits, overlap
from jrl.errors import UserError
from jrl.learner import Forward, Learner, make_optimizer
from jrl.losses import policy_loss, value_loss
from jrl.models import decoder
from jrl.models.arch import Arch
from jrl.models.load import LoadedModel, open_model
from jrl.models.unstack import worth_it
from jrl.plan import make_plan
from jrl.rewards import RewardManager
from jrl.rollout.engine import Engine
from jrl.rollout.weights import weight_publisher
from jrl.shapes import default_slots
from jrl.sharding.layout import Layout
from jrl.sharding.reshard import reshard

log = logging.getLogger("jrl")

FIRST_EVAL_SAMPLE = 1 << 31  # evaluation draws its random numbers from the upper half, training from the lower


@dataclasses.dataclass
class Parts:
    """The components of a run. Models other than the policy are None where the algorithm has no use for them."""

    arch: Arch
    tokenizer: Any
    dtype: Any  # of computation; master weights are float32
    train_prompts: list[Prompt]
    eval_prompts: list[Prompt]
    stream: PromptStream
    rewards: RewardManager
    policy: Learner
    initial_params: Any  # on the policy's mesh; dropped once the state is made
    engine: Engine
    rollout_weights: Callable[[Any], Any]  # from the policy's parameters, see `weight_publisher`
    critic: Learner | None
    initial_critic: Callable[[Any], Any] | None  # from the policy's initial parameters
    reference: Learner | None
    reference_params: Any
    updates_per_step: int
    policy_delay_steps: int
    first_eval_sample: int = FIRST_EVAL_SAMPLE


def build(config, reward: Callable | None = None, train_data: Any = None, eval_data: Any = None) -> Parts:
    """Everything a trainer needs; errors in the data or the meshes come before any weight is loaded.

    Raises:
      UserError: naming the key, its value and the remedy.
    """
    layouts = make_layouts(config)
    rewards = RewardManager.from_config(config.reward, reward)
    train, held_out = load_data(config, train_data, eval_data)
    for rows in filter(None, (train, held_out)):  # a column that only one of them has would cost the other its rewards
        rewards.check_columns({name for row in rows for name in row.columns})
    dtype = platform.compute_dtype(config.model.compute_dtype)
    found = open_model(config.model.path)
    make_plan(config, found.arch, len(jax.devices()))  # for its errors: what cannot run is refused before weights are read
    prompts, eval_prompts = (encode_prompts(config, rows, found.tokenizer) for rows in (train, held_out))
    stream = PromptStream(prompts, config.rollout.prompts_per_step, config.seed)
    model = found.load(layouts["learner"], config.seed)
    platform.configure()  # only now: what loading leaves behind goes back to the system
    forward = functools.partial(make_forward, config, model.arch, dtype)
    a = config.algorithm
    updates = a.epochs * a.minibatches
    delay = config.critic.policy_delay_steps if a.name == "ppo" else 0
    learner = functools.partial(Learner, microbatch_tokens=config.learner.microbatch_tokens)
    policy = learner(
        "policy", forward(layouts["learner"]), layouts["learner"], decoder.Decoder, loss=policy_loss(a),
        **optimizer(config.learner, (config.steps - delay) * updates),
    )  # fmt: skip
    critic = initial_critic = reference = reference_params = None
    if a.name == "ppo":
        critic = learner(
            "critic", forward(layouts["critic"]), layouts["critic"], decoder.Critic, loss=value_loss(config.critic),
            **optimizer(config.critic, config.steps * updates),
        )  # fmt: skip
        initial_critic = functools.partial(make_critic, model, critic)
    if a.kl_in != "none":
        reference = learner("reference", forward(layouts["reference"]), layouts["reference"], decoder.Decoder)
        reference_params = copy_params(model.params, reference.param_shardings)
    engine = make_engine(config, model, layouts["rollout"], dtype, prompts + eval_prompts)
    rollout_weights = weight_publisher(model.arch, layouts["learner"], layouts["rollout"], dtype, config.rollout.weights)
    return Parts(
        arch=model.arch, tokenizer=model.tokenizer, dtype=dtype, train_prompts=prompts, eval_prompts=eval_prompts,
        stream=stream, rewards=rewards, policy=policy,
        initial_params=model.params, engine=engine,
        rollout_weights=rollout_weights, critic=critic,
        initial_critic=initial_critic, reference=reference, reference_params=reference_params, updates_per_step=updates,
        policy_delay_steps=delay,
    )  # fmt: skip


def make_layouts(config) -> dict[str, Layout]:
    """The four meshes; critic and reference take the learner's where theirs is all 0."""
    layouts = {name: make_layout(config, name) for name in ("learner", "rollout")}
    for name in ("critic", "reference"):
        own = any(config[name].mesh.to_dict().values())
        layouts[name] = make_layout(config, name) if own else layouts["learner"]
    return layouts


def make_layout(config, section: str) -> Layout:
    kind = Layout.rollout if section == "rollout" else Layout.train
    try:
        return kind(config[section].mesh.to_dict())
    except UserError as error:
        raise UserError(f"config.{section}.mesh: {error}") from None


def make_forward(config, arch: Arch, dtype, layout: Layout) -> Forward:
    c = config.learner
    return Forward(arch, layout.constrain, dtype, c.remat, config.rollout.temperature, c.logit_chunk)


def optimizer(section, total_updates: int) -> dict[str, Any]:
    transform, schedule = make_optimizer(section, total_updates)
    return {"optimizer": transform, "schedule": schedule}


def copy_params(params, shardings):
    """The same values in arrays of their own, whatever the layout: the policy's are donated to its updates."""
    return reshard(jax.tree.map(jnp.copy, params), shardings)


def make_critic(model: LoadedModel, critic: Learner, params) -> Any:
    """A critic that starts from a copy of the policy's backbone, on the critic's mesh."""
    return reshard(decoder.critic_from_policy(model.arch, params), critic.param_shardings)


def load_data(config, train_data: Any, eval_data: Any) -> tuple[list, list]:
    """Training and held-out examples with no question in common; says how many, on stderr."""
    d = config.data
    train, held_out = load_splits(
        d.train if train_data is None else train_data,
        d.eval if eval_data is None else eval_data,
        train_size=d.train_size, eval_size=d.eval_size, seed=config.seed, options=d.options.to_dict(),
        prompt_key=d.prompt_key, answer_key=d.answer_key, prompt_suffix=d.prompt_suffix, repeats=d.repeats,
    )  # fmt: skip
    shared = overlap(train, held_out)
    log.info("data: %d distinct training problems, %d held out, %d in both", len(distinct(train)), len(held_out), shared)
    return train, held_out


def encode_prompts(config, examples: list, tokenizer) -> list[Prompt]:
    d = config.data
    return encode(examples, tokenizer, d.system_prompt, d.max_prompt_tokens, d.on_long, d.use_chat_template)


def make_engine(config, model: LoadedModel, layout: Layout, dtype, prompts: list[Prompt]) -> Engine:
    c = config.rollout
    slots = c.slots or default_slots(c.prompts_per_step * c.group_size, layout.batch_shards)
    longest = max(len(p.tokens) for p in prompts)
    unroll = worth_it(c.unroll_layers, layout.mesh.devices.flat[0].platform, c.max_new_tokens)
    return Engine(
        model.arch, layout, slots=slots, max_tokens=longest + c.max_new_tokens, eos_ids=model.eos_ids,
        page_size=c.page_size, num_pages=c.num_pages, decode_chunk=c.decode_chunk, dtype=dtype, seed=config.seed,
        attention=c.attention, kv=c.kv, unroll_layers=unroll, decode_text=model.tokenizer.decode, speculate=c.speculate,
    )  # fmt: skip
