"""The plan against the numbers that a run of it meets: arrays on devices, packed microbatches, page pools."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.config import default_config, override, validate
from jrl.errors import UserError
from jrl.models import decoder
from jrl.models.arch import KNOWN, Arch
from jrl.models.load import read_arch
from jrl.packing import pack
from jrl.plan import make_plan, num_devices
from jrl.rollout.backends import XlaBackend
from jrl.rollout.engine import Engine
from jrl.rollout.scheduler import Request
from jrl.rollout.weights import weight_publisher
from jrl.sharding.layout import Layout
from jrl.sharding.mesh import TRAIN_AXES
from jrl.types import Completion, make_rollout

GIB = 2**30
CRITIC = {"algorithm__name": "ppo", **{f"critic__mesh__{axis}": 1 for axis in TRAIN_AXES}}


def small_arch(**changes) -> Arch:
    arch = KNOWN["Qwen/Qwen2.5-0.5B-Instruct"]
    sizes = dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2)
    return dataclasses.replace(arch, **sizes, num_heads=8, num_kv_heads=4, head_dim=8, **changes)


def config(**overrides):
    c = default_config()
    c.model.path, c.data.train = "random:tiny", "train.jsonl"
    c.model.compute_dtype = "float32"
    for name, value in overrides.items():
        override(c, name.replace("__", "."), value)
    validate(c)
    return c


def bytes_on(tree, device) -> int:
    return sum(s.data.nbytes for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device == device)


@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 2, 2), (1, 2, 4)])
def test_weights_and_pool_take_the_bytes_that_the_plan_says(sizes):
    data, fsdp, tensor = sizes
    arch = small_arch()
    c = config(
        learner__mesh__data=data, learner__mesh__fsdp=fsdp, learner__mesh__tensor=tensor, rollout__mesh__tensor=tensor,
        algorithm__name="ppo", algorithm__kl_in="loss", algorithm__kl_coef=0.1, data__max_prompt_tokens=24,
        rollout__max_new_tokens=8, rollout__prompts_per_step=4, rollout__group_size=4,
    )  # fmt: skip
    plan = make_plan(c, arch, 8)
    device, layout = jax.devices()[0], Layout.train(c.learner.mesh.to_dict())

    def weight_bytes(model) -> int:
        shapes = decoder.abstract_params(arch, model)
        placed = layout.tree(decoder.param_axes(arch, model), shapes)
        zeros = jax.tree.map(lambda x, s: jax.device_put(np.zeros(x.shape, x.dtype), s), shapes, placed)
        return bytes_on(zeros, device)

    weights = weight_bytes(decoder.Decoder)
    assert plan.held_bytes["policy: parameters, float32"] == weights
    assert plan.held_bytes["policy: Adam's moments, float32"] == 2 * weights
    assert plan.held_bytes["reference: parameters, float32"] == weights
    assert plan.held_bytes["critic: parameters, float32"] == weight_bytes(decoder.Critic)
    engine = Engine(
        arch, Layout.rollout(c.rollout.mesh.to_dict()), slots=plan.batch["slots"], max_tokens=32, eos_ids=(1,),
        page_size=c.rollout.page_size, num_pages=c.rollout.num_pages, decode_chunk=4,
    )  # fmt: skip
    assert plan.held_bytes["rollout: KV pool, float32, at most"] == bytes_on(engine.pool, device)
    assert plan.batch["num_pages"] == engine.shape.num_pages and plan.batch["replicas"] == engine.replicas


@pytest.mark.parametrize("tensor", [1, 4])
def test_integers_take_the_bytes_that_the_plan_says(tensor):
    int8 = dict(rollout__weights="int8", rollout__kv="int8", algorithm__rollout_is_cap=2.0)
    sizes = dict(data__max_prompt_tokens=24, rollout__max_new_tokens=8, rollout__prompts_per_step=4, rollout__group_size=4)
    arch, plain = small_arch(), config(rollout__mesh__tensor=tensor, **sizes)
    c = config(rollout__mesh__tensor=tensor, **sizes, **int8)
    plan, train, rollout = make_plan(c, arch, 8), Layout.train({"fsdp": 8}), Layout.rollout({"replica": -1, "tensor": tensor})
    published = weight_publisher(arch, train, rollout, jnp.float32, "int8")(decoder.init_params(arch, 0, train))
    assert plan.phase_bytes["generating"]["rollout weights, int8"] == bytes_on(published, jax.devices()[0])
    arrays = XlaBackend(arch, rollout, jnp.float32, "int8").pool_arrays(plan.batch["num_pages"], plan.batch["page_size"])
    pool = {n: jax.device_put(np.zeros(x.shape, x.dtype), rollout.sharding(x.axes, x.shape)) for n, x in arrays.items()}
    assert plan.held_bytes["rollout: KV pool, int8, at most"] == bytes_on(pool, jax.devices()[0])
    whole = make_plan(plain, arch, 8).held_bytes["rollout: KV pool, float32, at most"]
    assert bytes_on(pool, jax.devices()[0]) == whole * (1 + 4 / arch.head_dim) / 4


def test_workers_take_nothing_of_the_learners_devices():
    """Nor does their mesh have to suit these."""
    sizes = dict(rollout__workers=2, max_staleness=1)
    with_workers = make_plan(config(rollout__mesh__tensor=16, **sizes), small_arch(), 8)
    assert not any("rollout" in name for name in [*with_workers.held_bytes, *with_workers.programs, *with_workers.meshes])
    assert with_workers.phase_bytes.keys() == {"updating the policy"} and "2 workers, each on devices" in with_workers.text()
    here = make_plan(config(), small_arch(), 8)
    assert here.phase_bytes["updating the policy"] == with_workers.phase_bytes["updating the policy"]


def rollout_bytes(plan) -> int:
    return next(n for name, n in plan.phase_bytes["generating"].items() if name.startswith("rollout weights"))


def test_rollout_weights_are_the_policys_own_only_where_placement_and_dtype_agree():
    arch = small_arch()
    whole = 4 * arch.num_params()
    same = config(learner__mesh__fsdp=1, learner__mesh__data=-1)
    assert rollout_bytes(make_plan(same, arch, 8)) == 0
    tensor = dict(learner__mesh__tensor=2, rollout__mesh__tensor=2)
    assert rollout_bytes(make_plan(config(learner__mesh__fsdp=1, learner__mesh__data=-1, **tensor), arch, 8)) == 0
    bf16 = config(learner__mesh__fsdp=1, learner__mesh__data=-1, model__compute_dtype="bfloat16")
    assert rollout_bytes(make_plan(bf16, arch, 8)) == whole // 2
    # Under fsdp only the norms and biases, which it does not split, stay where they are.
    fsdp = rollout_bytes(make_plan(config(), arch, 8))
    assert 0.98 * whole < fsdp < whole


def test_batch_arithmetic_by_hand():
    c = config(
        rollout__prompts_per_step=16, rollout__group_size=4, rollout__max_new_tokens=32, data__max_prompt_tokens=64,
        algorithm__epochs=2, algorithm__minibatches=4, steps=10, learner__microbatch_tokens=500,
        rollout__mesh__replica=2, learner__mesh__fsdp=2, rollout__page_size=16,
    )  # fmt: skip
    b = make_plan(c, small_arch(), 2).batch
    assert b["sequences"] == 64 and b["minibatch_sequences"] == 16 and b["minibatch_prompts"] == 4
    assert b["updates"] == 80
    assert b["tokens"] == 16 * 64 + 64 * 32
    assert b["slots"] == 32 and b["num_pages"] == 32 * 6 + 6 + 1  # 96 tokens are 6 pages
    # A group is 64 + 4 x 32 = 192 padded tokens, so 2 groups of 4 fit into 500; 2 shards take the 16 at once.
    assert b["microbatch_sequences"] == 8 and b["microbatches"] == 1


@pytest.mark.parametrize(("group", "budget", "shards"), [(4, 500, 2), (8, 120, 1), (1, 4096, 4)])
def test_every_packed_microbatch_has_a_size_of_the_plan(group, budget, shards):
    prompts = 16
    c = config(
        rollout__prompts_per_step=prompts, rollout__group_size=group, rollout__max_new_tokens=40,
        data__max_prompt_tokens=50, learner__microbatch_tokens=budget, learner__mesh__fsdp=shards,
        algorithm__name="ppo", algorithm__minibatches=2,
    )  # fmt: skip
    plan = make_plan(c, small_arch(), shards)
    sizes = {name.partition(" ")[0]: set(shapes) for name, shapes in plan.programs.items()}
    rng = np.random.default_rng(0)
    met = set()
    for _ in range(20):
        longest = rng.integers(1, 51), rng.integers(1, 41)
        texts = [rng.integers(0, 500, rng.integers(1, longest[0] + 1)).astype(np.int32) for _ in range(prompts)]
        zeros = [np.zeros(rng.integers(1, longest[1] + 1)) for _ in range(prompts * group)]
        done = [
            Completion(i // group, i % group, z.astype(np.int32), z, z, z.astype(np.int32), "length") for i, z in enumerate(zeros)
        ]
        rollout = make_rollout(texts, done)
        rows = np.flatnonzero(rollout.group_ids < prompts // 2)
        update = {p.shape for p in pack(rollout, {}, rows, shards, budget)}
        forward = {p.shape for p in pack(rollout, {}, np.arange(len(rollout)), shards, budget)}
        assert update <= sizes["policy.update"] and forward <= sizes["critic.values"]
        met |= update | forward
    assert len(met) > 3  # the sizes did vary


def test_drafts_are_one_more_program_of_the_same_sizes_and_their_logits_are_counted():
    arch = dataclasses.replace(small_arch(), vocab_size=400000)
    plain, drafting = (make_plan(config(rollout__speculate=k), arch, 1) for k in (0, 3))
    name = "rollout.{} (rows, pages of a row, shared prefixes, their members, their rows, pages of such a row)"
    assert drafting.programs[name.format("speculate")] == drafting.programs[name.format("decode")]
    assert plain.programs.keys() == drafting.programs.keys() - {name.format("speculate")}
    work = [plan.phase_bytes["generating"]["work arrays, estimate"] for plan in (plain, drafting)]
    assert work[0] + 3 * 64 * 400000 * 8 == work[1]  # logits and probabilities, float32


def engine_run(monkeypatch, replicas=1, **overrides):
    """A plan, and what an engine like that of its run has compiled for rounds of prompts that begin alike."""
    monkeypatch.setattr(XlaBackend, "row_pages", 2)
    monkeypatch.setattr("jrl.rollout.prefill.PREFILL_TOKENS", 24)
    arch = small_arch()
    c = config(
        rollout__slots=4, rollout__group_size=4, rollout__max_new_tokens=14, data__max_prompt_tokens=22, rollout__page_size=4,
        rollout__prompts_per_step=8, rollout__decode_chunk=5, rollout__mesh__replica=replicas, learner__mesh__fsdp=replicas,
        **overrides,
    )  # fmt: skip
    plan = make_plan(c, arch, replicas)
    engine = Engine(
        arch, Layout.rollout(c.rollout.mesh.to_dict(), jax.devices()[:replicas]), slots=4, max_tokens=36, eos_ids=(1,),
        page_size=4, num_pages=c.rollout.num_pages, decode_chunk=5,
    )  # fmt: skip
    engine.load(decoder.init_params(arch, 0, engine.layout), 0)
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(3, 500, n).astype(np.int32)  # noqa: E731
    system = draw(9)
    engine.generate([Request(draw(2), 1, 2, 1.0, 0, True)])
    for lengths, samples in ((2, 9), 1), ((13, 1, 1, 2), 2), ((0, 13, 2, 1), 4):
        prompts = [np.concatenate([system, draw(n)]) for n in lengths] + [draw(2), draw(6)]
        engine.generate([Request(p, samples, int(rng.integers(4, 15)), 1.0, 0, True) for p in prompts])
    assert engine.shape.num_pages == plan.batch["num_pages"]
    return plan, engine


@pytest.mark.parametrize(
    ("replicas", "overrides", "preempts"),
    [
        pytest.param(1, {"rollout__num_pages": 14}, True, marks=pytest.mark.slow),
        pytest.param(2, {}, False, marks=pytest.mark.slow),
    ],
)
def test_every_program_of_an_engine_has_a_size_of_the_plan(replicas, overrides, preempts, monkeypatch):
    plan, engine = engine_run(monkeypatch, replicas, **overrides)
    sizes = {name.partition(" ")[0]: set(shapes) for name, shapes in plan.programs.items()}
    met: dict[str, set] = {"rollout.prefill": set(), "rollout.decode": set(), "rollout.copy": set()}
    for name, *key in engine.compiled.seen:
        if name == "prefill":
            score, *size = key
            assert not score
        elif name == "decode":
            own, _, _, _, shared, _, members, _, best, controlled = key
            assert not best and not controlled
            size = [*own, *members, *shared]
        else:
            size = key
        met[f"rollout.{name}"].add(tuple(size))
    for name, shapes in met.items():
        assert shapes <= sizes[name], (name, shapes - sizes[name])
    # They did vary, on one replica in every dimension.
    assert bool(engine.stats.preemptions) == preempts
    assert all(len(shapes) > 1 for shapes in met.values())
    if replicas == 1:
        assert all(len({size[i] for size in met["rollout.prefill"]}) > 1 for i in range(3))
        assert all(len({size[i] for size in met["rollout.decode"]}) > 1 for i in range(6))


def test_programs_are_those_of_the_algorithm():
    def names(**overrides):
        return {name.partition(" ")[0] for name in make_plan(config(**overrides), small_arch(), 1).programs}

    rollout = {"rollout.prefill", "rollout.decode", "rollout.copy"}
    assert names() == rollout | {"policy.update"}
    assert names(algorithm__epochs=2) == rollout | {"policy.update", "policy.logprobs"}
    assert names(algorithm__kl_in="loss", algorithm__kl_coef=0.1) == rollout | {"policy.update", "reference.logprobs"}
    assert names(algorithm__name="ppo") == rollout | {"policy.update", "critic.update", "critic.values"}


def test_longer_sequences_and_less_remat_need_more():
    arch = small_arch()
    peak = {remat: make_plan(config(learner__remat=remat), arch, 1).peak_bytes for remat in ("offload", "full", "dots", "none")}
    assert peak["offload"] < peak["full"] < peak["dots"] < peak["none"]
    assert make_plan(config(rollout__max_new_tokens=512), arch, 1).peak_bytes > peak["full"]


@pytest.mark.parametrize(
    ("overrides", "devices", "part"),
    [
        ({"rollout__mesh__tensor": 16}, 16, "^config.rollout.mesh: rollout layout: 'act_heads'"),
        ({"learner__mesh__tensor": 16}, 16, "^config.learner.mesh: train layout: 'act_heads' of size 8"),
        ({"learner__mesh__fsdp": 3}, 8, "^config.learner.mesh: train mesh: "),
        ({"learner__mesh__fsdp": 24}, 24, "^config.learner.mesh: .*: train layout: "),
        (CRITIC | {"critic__mesh__fsdp": 2}, 8, "^config.critic.mesh: train mesh: "),
        (CRITIC | {"critic__mesh__tensor": 16}, 16, "^config.critic.mesh: .*'act_heads'"),
        ({"data__max_prompt_tokens": 40_000}, 1, "config.rollout.max_new_tokens=256"),
    ],
)
def test_what_does_not_fit_is_refused(overrides, devices, part):
    with pytest.raises(UserError, match=part):
        make_plan(config(**overrides), small_arch(), devices)


def test_what_waits_with_the_hosts_is_counted_apart():
    asked = {"algorithm__name": "ppo", "algorithm__kl_in": "loss", "algorithm__kl_coef": 0.1}
    far = {"learner__optimizer_memory": "pinned_host", "critic__optimizer_memory": "pinned_host",
           "reference__memory": "pinned_host"}  # fmt: skip
    near, waiting = (make_plan(config(**asked, **keys), small_arch(), 8) for keys in ({}, far))
    moved = {"policy: Adam's moments, float32", "critic: Adam's moments, float32", "reference: parameters, float32"}
    assert set(waiting.host_bytes) == moved == near.held_bytes.keys() - waiting.held_bytes.keys() and not near.host_bytes
    assert waiting.held_bytes | waiting.host_bytes == near.held_bytes
    assert near.peak_bytes - waiting.peak_bytes == sum(waiting.host_bytes.values())
    assert all(name in waiting.text() for name in moved) and waiting.text().count("in its host's memory") == 3


def test_a_large_model_on_many_devices_is_planned_without_them():
    # 32B fp32 masters and two moments are 12 bytes a parameter; over 64 chips 32.8e9 * 12 / 64 = 5.7 GiB.
    meshes = dict(learner__mesh__fsdp=16, learner__mesh__tensor=4, rollout__mesh__tensor=8)
    c = config(model__compute_dtype="bfloat16", **meshes)
    arch = read_arch("Qwen/Qwen2.5-32B-Instruct")
    assert num_devices(c) == 64
    plan = make_plan(c, arch, 64)
    state = plan.held_bytes["policy: parameters, float32"] + plan.held_bytes["policy: Adam's moments, float32"]
    assert state / GIB == pytest.approx(arch.num_params() * 12 / 64 / GIB, rel=0.01) and 5.5 < state / GIB < 6.5
    assert rollout_bytes(plan) == pytest.approx(arch.num_params() * 2 / 8, rel=0.01)


def test_devices_of_a_plan():
    assert num_devices(config()) == len(jax.devices()) == 8
    assert num_devices(config(rollout__mesh__replica=4, rollout__mesh__tensor=4)) == 16


def test_text_and_dict_say_the_same():
    plan = make_plan(config(), small_arch(), 8)
    d = json.loads(json.dumps(plan.to_dict()))
    most = max(sum(parts.values()) for parts in plan.phase_bytes.values())
    assert d["peak_bytes"] == plan.peak_bytes == sum(plan.held_bytes.values()) + most
    text = plan.text()
    assert "32 prompts x 8 samples = 256 sequences" in text and "data=1 fsdp=8 context=1 tensor=1" in text
    for name in [*plan.held_bytes, *plan.meshes]:
        assert name in text
    assert all(min(size) >= 0 and size[0] > 0 for sizes in plan.programs.values() for size in sizes)
    assert "pools of at most" in text
