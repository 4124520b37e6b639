"""Puts a run together from its config: data first, then the model, then what trains it and what generates from it."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrl import platform
from jrl.algorithms.pieces import Pieces, critic_head_named, needs_critic, needs_old_logprobs
from jrl.data import Prompt, PromptStream, distinct, encode, load_splits, overlap
from jrl.errors import UserError
from jrl.learner import Forward, Learner, make_optimizer
from jrl.losses import policy_loss, value_loss
from jrl.models import decoder
from jrl.models.arch import Arch
from jrl.models.load import LoadedModel, open_model
from jrl.models.unstack import worth_it
from jrl.plan import make_plan
from jrl.plan.auto import refuse_what_cannot_fit
from jrl.rewards import RewardManager
from jrl.rewards.judge import NAME as JUDGE
from jrl.rewards.judge import judge
from jrl.rewards.model import NAME as REWARD_MODEL
from jrl.rewards.model import Chats, ModelReward
from jrl.rollout.engine import Engine
from jrl.rollout.weights import weight_publisher
from jrl.rollout.workers import Workers
from jrl.shapes import default_slots
from jrl.sharding.hosts import Shares, own_part, own_replicas, shares
from jrl.sharding.layout import Layout
from jrl.sharding.memory_kinds import HOST
from jrl.sharding.mesh import device_order
from jrl.sharding.offload import check_host_memory
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
    chats: Chats  # of the prompts that rewards are asked about
    pieces: Pieces
    policy: Learner
    initial_params: Any  # on the policy's mesh; dropped once the state is made
    engine: Engine | Workers  # this process's, or processes of their own
    eos_ids: tuple[int, ...]
    shares: Shares  # what it generates and scores of a step
    rollout_weights: Callable[[Any], Any]  # from the policy's parameters, see `weight_publisher`
    critic: Learner | None
    initial_critic: Callable[[Any], Any] | None  # from the policy's initial parameters
    reference: Learner | None
    reference_params: Any
    updates_per_step: int
    old_logprobs: bool  # they have to be computed: the current ones do not stand for them
    policy_delay_steps: int
    first_eval_sample: int = FIRST_EVAL_SAMPLE


def build(
    config, pieces: Pieces, reward: Callable | None = None, train_data: Any = None, eval_data: Any = None, speaker: int = 0,
    critic_head: Callable | None = None,
) -> Parts:  # fmt: skip
    """Everything a trainer needs; errors in the data or the meshes come before any weight is loaded.

    Args:
      config: with every choice made, see `jrl.config.resolve`.
      speaker: the agent's number among several, which samples by random numbers of its own.

    Raises:
      UserError: naming the key, its value and the remedy.
    """
    layouts = make_layouts(config)
    chats = Chats()
    mine = shares(layouts["rollout"])
    check_asynchrony(config, layouts)
    if config.rollout.speculate and not mine.alone:  # speed decides who drafts, and is not the same in all processes
        raise UserError(
            f"config.rollout.speculate={config.rollout.speculate}: a replica spans several processes, which cannot time alike; "
            "give 0, or a rollout.mesh.tensor within a process"
        )
    rewards, reward_model = make_rewards(config, layouts, chats, reward)
    train, held_out = load_data(config, train_data, eval_data)
    for rows in filter(None, (train, held_out)):  # a column that only one of them has would cost the other its rewards
        told = {"transcript"} if config.agents.turns else set()
        rewards.check_columns({name for row in rows for name in row.columns} | told)
    dtype = platform.compute_dtype(config.model.compute_dtype)
    found = open_model(config.model.path)
    if found.scores:
        raise UserError(f"config.model.path={config.model.path}: is a reward model, which writes no text; give a language model")
    plan = make_plan(config, found.arch, len(jax.devices()))  # for its errors: what cannot run is refused before weights are read
    refuse_what_cannot_fit(plan, found.arch, jax.devices())
    prompts, eval_prompts = (encode_prompts(config, rows, found.tokenizer) for rows in (train, held_out))
    chats.hold(prompts + eval_prompts)
    stream = PromptStream(prompts, config.rollout.prompts_per_step, config.seed)
    model = found.load(layouts["learner"], config.seed)
    platform.configure()  # only now: what loading leaves behind goes back to the system
    if reward_model:
        reward_model.load()
    a = config.algorithm
    policy = make_policy_learner(config, model.arch, layouts["learner"], dtype, pieces.policy_loss)
    critic = initial_critic = reference = reference_params = None
    if pieces.critic:
        critic = make_critic_learner(config, model.arch, layouts["critic"], dtype, critic_head)
        initial_critic = functools.partial(make_critic, model, critic, config.seed)
    if a.kl_in != "none":
        reference = make_reference_learner(config, model.arch, layouts["reference"], dtype)
        reference_params = copy_params(model.params, reference.param_shardings)
    longest = config.data.max_prompt_tokens if config.agents.turns else max(len(p.tokens) for p in prompts + eval_prompts)
    engine, publish = make_generation(config, model, layouts, dtype, longest, speaker)
    return Parts(
        arch=model.arch, tokenizer=model.tokenizer, dtype=dtype, train_prompts=prompts, eval_prompts=eval_prompts,
        stream=stream, rewards=rewards, chats=chats, pieces=pieces, policy=policy,
        initial_params=model.params, engine=engine, eos_ids=model.eos_ids, shares=mine,
        rollout_weights=publish, critic=critic,
        initial_critic=initial_critic, reference=reference, reference_params=reference_params,
        updates_per_step=updates_per_step(config), policy_delay_steps=policy_delay_steps(config),
        old_logprobs=needs_old_logprobs(a),
    )  # fmt: skip


def make_layouts(config, devices: Sequence[jax.Device] | None = None) -> dict[str, Layout]:
    """The meshes, by default over all devices.

    Critic, reference and reward take the learner's where theirs is all 0, or all of fsdp where they have devices of their own.

    Raises:
      UserError: a mesh does not fit the devices, or a model on it is to use memory that they do not have.
    """
    pools = pool_devices(config, device_order(devices).tolist())
    elsewhere = {"replica": -1} if config.rollout.workers else None  # then this mesh says no more than who asks for what
    layouts = {
        "learner": make_layout(config, "learner", pools["learner"]),
        "rollout": make_layout(config, "rollout", pools["rollout"], elsewhere),
    }
    for name in ("critic", "reference", "reward"):
        own = any(config[name].mesh.to_dict().values())
        if own or config.pools[name]:
            layouts[name] = make_layout(config, name, pools[name], None if own else {"fsdp": -1})
        else:
            layouts[name] = layouts["learner"]
    check_memories(config, layouts)
    return layouts


def check_asynchrony(config, layouts: dict[str, Layout]) -> None:
    """Refuses generation beside learning where both would wait for each other on the same devices."""
    told = f"config.max_staleness={config.max_staleness}"
    if not config.max_staleness:
        return
    if config.rollout.workers % jax.process_count():
        raise UserError(
            f"config.rollout.workers={config.rollout.workers}: each of the learner's {jax.process_count()} processes has as many;"
            f" give a multiple of {jax.process_count()}, or 0"
        )
    if not shares(layouts["rollout"]).alone:
        raise UserError(f"{told}: a replica spans several processes; give 0, or a rollout.mesh.tensor within a process")
    if jax.process_count() > 1 and config.algorithm.dynamic_sampling:
        raise UserError(f"{told}: with several processes dynamic sampling would need others' groups; give 0, or turn it off")
    if not (config.pools.rollout or config.rollout.workers) and layouts["learner"].mesh.size > 1:
        raise UserError(
            f"{told}: two programs at a time on the same devices may wait for each other for ever; give generation its own,"
            f" pools.rollout=N, of the {layouts['learner'].mesh.size} devices, or 0"
        )


def pool_devices(config, devices: Sequence[jax.Device]) -> dict[str, list[jax.Device]]:
    """The devices of each model: of every process the last ones for those that have their own, the rest for the learner and for
    all that share with it.

    Raises:
      UserError: the pools leave the learner nothing, or cannot be had from every process alike.
    """
    wanted = config.pools.to_dict()
    left = {i: [d for d in devices if d.process_index == i] for i in sorted({d.process_index for d in devices})}
    found: dict[str, list[jax.Device]] = {}
    for name, count in wanted.items():
        each, rest = divmod(count, len(left))
        if rest or any(each >= len(mine) for mine in left.values()):
            raise UserError(
                f"config.pools.{name}={count}: there are {len(devices)} devices of {len(left)} processes, of which every process"
                f" gives as many, and the learner needs one of each; give less, or a multiple of {len(left)}"
            )
        found[name] = [device for mine in left.values() for device in mine[len(mine) - each :]]
        left = {i: mine[: len(mine) - each] for i, mine in left.items()}
    shared = [device for mine in left.values() for device in mine]
    return {"learner": shared} | {name: own or shared for name, own in found.items()}


def check_memories(config, layouts: dict[str, Layout]) -> None:
    """Refuses keys that ask for memory which the devices of these layouts do not have."""
    for name, key in (("learner", "optimizer_memory"), ("critic", "optimizer_memory"), ("reference", "memory")):
        if name in layouts and config[name][key] == HOST:
            check_host_memory(f"{name}.{key}={HOST}", layouts[name])
    if config.learner.remat == "offload":
        check_host_memory("learner.remat=offload", layouts["learner"], other="full")


def make_layout(config, section: str, devices: Sequence[jax.Device] | None = None, sizes: dict[str, int] | None = None) -> Layout:
    """One of the meshes, of the config's sizes unless others are given; by default over all devices."""
    kind = Layout.rollout if section == "rollout" else Layout.train
    try:
        return kind(config[section].mesh.to_dict() if sizes is None else sizes, devices)
    except UserError as error:
        raise UserError(f"config.{section}.mesh: {error}") from None


def make_forward(config, arch: Arch, dtype, layout: Layout, value_head: Callable | None = None) -> Forward:
    c = config.learner
    return Forward(arch, layout, dtype, c.remat, config.rollout.temperature, c.logit_chunk, value_head)


def updates_per_step(config) -> int:
    return config.algorithm.epochs * config.algorithm.minibatches


def policy_delay_steps(config) -> int:
    """Steps in which only the critic learns."""
    return config.critic.policy_delay_steps if needs_critic(config.algorithm) else 0


def make_policy_learner(config, arch: Arch, layout: Layout, dtype, loss: Callable) -> Learner:
    """The policy with its token loss, see `jrl.algorithms.policy_loss`."""
    updates = (config.steps - policy_delay_steps(config)) * updates_per_step(config)
    return Learner(
        "policy", make_forward(config, arch, dtype, layout), layout, decoder.Decoder, config.learner.microbatch_tokens,
        policy_loss(config.algorithm, loss), *make_optimizer(config.learner, updates),
        optimizer_memory=config.learner.optimizer_memory,
    )  # fmt: skip


def make_critic_learner(config, arch: Arch, layout: Layout, dtype, head: Callable | None = None) -> Learner:
    """
    Args:
      head: in place of that of `critic.head`, see `jrl.models.decoder.Critic`.
    """
    head = head or critic_head_named(config.critic.head)
    return Learner(
        "critic", make_forward(config, arch, dtype, layout, head), layout, decoder.critic_with(head),
        config.learner.microbatch_tokens, value_loss(config.critic),
        *make_optimizer(config.critic, config.steps * updates_per_step(config)),
        optimizer_memory=config.critic.optimizer_memory,
    )  # fmt: skip


def make_reference_learner(config, arch: Arch, layout: Layout, dtype) -> Learner:
    """A model that is only run."""
    forward = make_forward(config, arch, dtype, layout)
    return Learner(
        "reference", forward, layout, decoder.Decoder, config.learner.microbatch_tokens, param_memory=config.reference.memory
    )


def make_rewards(
    config, layouts: dict[str, Layout], chats: Chats, reward: Callable | None
) -> tuple[RewardManager, ModelReward | None]:
    """The rewards, and the model among them, without its weights as yet.

    Args:
      reward: a Python function in place of `reward.functions`.
    """
    section = config.reward
    for key, value in (("model.path", section.model.path), ("judge.url", section.judge.url)):
        if reward is not None and value:
            raise UserError(
                f"config.reward.{key}={value}: nothing asks it, as a Python function is the reward; leave out it and"
                " reward.functions"
            )
    runners: dict[str, Any] = {}
    if section.model.path:
        runners[REWARD_MODEL] = make_reward_model(config, layouts, chats)
    if section.judge.url:
        runners[JUDGE] = judge(section.judge.to_dict(), chats)
    return RewardManager.from_config(section, reward, runners), runners.get(REWARD_MODEL)


def make_reward_model(config, layouts: dict[str, Layout], chats: Chats) -> ModelReward:
    """The reward model, without its weights as yet."""
    dtype = platform.compute_dtype(config.model.compute_dtype)

    def forward(arch: Arch, layout: Layout) -> Forward:
        return make_forward(config, arch, dtype, layout)

    return ModelReward(config.reward.model.path, layouts["reward"], forward, config.learner.microbatch_tokens, chats)


def copy_params(params, shardings):
    """The same values in arrays of their own, whatever the layout: the policy's are donated to its updates.

    One after another: where the copies go to host memory there is never a second set on the devices.
    """
    return jax.tree.map(lambda x, sharding: jax.block_until_ready(reshard(jnp.copy(x), sharding)), params, shardings)


def make_critic(model: LoadedModel, critic: Learner, seed: int, params) -> Any:
    """A critic that starts from a copy of the policy's backbone, on the critic's mesh."""
    made = decoder.critic_from_policy(model.arch, params, head=critic.forward.value_head, seed=seed)
    return reshard(made, critic.param_shardings)


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


def make_generation(
    config, model: LoadedModel, layouts: dict[str, Layout], dtype, longest: int, speaker: int
) -> tuple[Engine | Workers, Callable[[Any], Any]]:
    """What generates, and from the policy's parameters the weights that it loads.

    Args:
      longest: tokens of the longest prompt.
    """
    c, layout = config.rollout, layouts["rollout"]
    if c.workers:
        try:
            from jrl.launch.delivery import Delivery
            from jrl.launch.rollout import ray_workers
        except ImportError as error:
            raise UserError(f"config.rollout.workers={c.workers}: needs Ray ({error}); pip install 'jrl[ray]'") from None
        return ray_workers(config, model.arch, model.eos_ids, longest), Delivery(dtype)
    # As many slots for each of this process's replicas as those of others have.
    slots = c.slots or default_slots(c.prompts_per_step * c.group_size, layout.batch_shards)
    own, seed = own_replicas(layout), (config.seed + speaker) % 2**32
    engine = engine_of(config, model.arch, model.eos_ids, own, dtype, longest, slots, seed, model.tokenizer.decode)
    publish = weight_publisher(model.arch, layouts["learner"], layout, dtype, c.weights)
    return engine, lambda params: own_part(publish(params), own)


def engine_of(
    config, arch: Arch, eos_ids: tuple[int, ...], layout: Layout, dtype, longest: int, slots: int, seed: int,
    decode_text: Callable | None,
) -> Engine:  # fmt: skip
    """The engine of a run's config on the devices of a layout."""
    c = config.rollout
    unroll = worth_it(c.unroll_layers, layout.mesh.devices.flat[0].platform, c.max_new_tokens)
    return Engine(
        arch, layout, slots=slots, max_tokens=longest + c.max_new_tokens, eos_ids=eos_ids,
        page_size=c.page_size, num_pages=c.num_pages, decode_chunk=c.decode_chunk, dtype=dtype,
        seed=seed, attention=c.attention, kv=c.kv, unroll_layers=unroll, decode_text=decode_text, speculate=c.speculate,
    )  # fmt: skip
