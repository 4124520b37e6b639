"""The modelled step against numbers worked by hand, on a chip of round numbers."""

import dataclasses

import pytest

from jrl.config import default_config, override, validate
from jrl.models.arch import Arch
from jrl.plan import cost as cost_lib
from jrl.plan import make_plan
from jrl.plan.chips import Chip
from jrl.plan.cost import matrix_params, step_cost

# Eight devices on a switch. 100 operations, 10 bytes read and 1 byte received a second, all of them attained.
CHIP = Chip("abacus", "tpu", 100.0, 1e12, 10.0, 1.0, 0, 0, None, 1.0, 8)
LAYERS, HIDDEN, MLP, HEADS, KV, HEAD, VOCAB = 2, 16, 32, 4, 2, 4, 64
ARCH = Arch("llama", VOCAB, HIDDEN, MLP, LAYERS, HEADS, KV, HEAD, 1e4, None, 1e-5, True, False, False, False, False, 64)
BODY = LAYERS * (HIDDEN * HEADS * HEAD * 2 + HIDDEN * KV * HEAD * 2 + 3 * HIDDEN * MLP)  # q and o, k and v, the MLP
NORMS = (2 * LAYERS + 1) * HIDDEN


@pytest.fixture(autouse=True)
def whole_shares(monkeypatch):
    for name in ("MATMUL_SHARE", "READ_SHARE", "LINK_SHARE", "HOST_RATE"):
        monkeypatch.setattr(cost_lib, name, 1.0)
    for name in ("COLLECTIVE_SECONDS", "HOP_SECONDS"):
        monkeypatch.setattr(cost_lib, name, 0)


def planned(devices, chip=CHIP, **overrides):
    c = default_config()
    given = {
        "model.path": "random:tiny", "data.train": "x.jsonl", "data.max_prompt_tokens": 16, "rollout.max_new_tokens": 16,
        "rollout.prompts_per_step": 8, "rollout.group_size": 2, "learner.microbatch_tokens": 48,
        "model.compute_dtype": "bfloat16",
    } | {name.replace("__", "."): value for name, value in overrides.items()}  # fmt: skip
    for name, value in given.items():
        override(c, name, value)
    validate(c)
    plan = make_plan(c, ARCH, devices, "tpu")
    return plan, step_cost(plan, ARCH, c, chip).phases


def test_weights_that_tokens_are_multiplied_with():
    assert matrix_params(ARCH) == BODY + NORMS + VOCAB * HIDDEN
    assert matrix_params(ARCH, head=False) == BODY + NORMS
    untied = dataclasses.replace(ARCH, tie_embeddings=False)
    assert matrix_params(untied) == matrix_params(ARCH) and untied.num_params() == ARCH.num_params() + VOCAB * HIDDEN


def test_an_update_on_one_device_is_arithmetic_alone():
    plan, phases = planned(1, learner__remat="full")
    assert plan.batch["microbatches"] == 8  # of one prompt and two responses each
    tokens, pairs = 8 * 16 + 16 * 16, 8 * 16 * 16 + 16 * 16 * 32
    forward = 2 * (BODY + NORMS + VOCAB * HIDDEN) * tokens + 4 * LAYERS * HEADS * HEAD * pairs
    assert phases["update"].flops == 4 * forward  # forward, twice that in backward, and forward again
    assert phases["update"].received_bytes == 0
    # The optimizer reads gradient, weight and two moments and writes all but the gradient, of 4 bytes each.
    assert phases["update"].busy_seconds == pytest.approx(4 * forward / 100 + 7 * 4 * ARCH.num_params() / 10)
    assert planned(1, learner__remat="none")[1]["update"].flops == 3 * forward
    # In microbatches of one response each, every one brings its prompt along.
    _, alone = planned(1, learner__remat="full", learner__microbatch_tokens=32)
    tokens, pairs = 16 * 16 + 16 * 16, 16 * 16 * 16 + 16 * 16 * 32
    assert alone["update"].flops == 4 * (2 * (BODY + NORMS + VOCAB * HIDDEN) * tokens + 4 * LAYERS * HEADS * HEAD * pairs)


def test_fsdp_gathers_weights_twice_and_scatters_gradients_once_a_microbatch():
    plan, phases = planned(8, learner__mesh__fsdp=8)
    assert plan.batch["microbatches"] == 1
    params = ARCH.num_params()
    assert phases["update"].received_bytes == pytest.approx((2 * 2 * params + 2 * params) * 7 / 8)
    with_data = planned(8, learner__mesh__data=2, learner__mesh__fsdp=4)[1]["update"]
    assert with_data.received_bytes == pytest.approx((2 * 2 * params + 2 * params) * 3 / 4 + 2 * 2 * params / 4 * 1 / 2)
    more = planned(8, learner__mesh__fsdp=8, rollout__prompts_per_step=32)[1]["update"]
    assert more.received_bytes == pytest.approx(4 * phases["update"].received_bytes)


def test_among_all_devices_of_a_torus_with_three_axes_parts_are_summed_in_place_of_scattered_or_gathered(monkeypatch):
    params, torus = ARCH.num_params(), dataclasses.replace(CHIP, torus_axes=3, torus_wraps=4)
    received = lambda chip, **mesh: planned(8, chip, **mesh)[1]["update"].received_bytes  # noqa: E731
    assert received(torus, learner__mesh__fsdp=8) == pytest.approx((2 * 2 * params + 2 * 2 * params) * 7 / 8)
    monkeypatch.setattr(cost_lib, "WHOLE_TORUS", 8)
    assert received(torus, learner__mesh__fsdp=8) == pytest.approx((2 * 2 * 2 * params + 2 * 2 * params) * 7 / 8)
    flat = dataclasses.replace(torus, torus_axes=2)
    assert received(flat, learner__mesh__fsdp=8) == pytest.approx((2 * 2 * params + 2 * params) * 7 / 8)
    part = {"learner__mesh__fsdp": 4, "learner__mesh__data": 2}
    assert received(torus, **part) == received(flat, **part)


def test_tensor_parallelism_sums_activations_six_times_a_layer():
    _, phases = planned(2, learner__mesh__tensor=2, learner__mesh__fsdp=1)
    tokens = 8 * 16 + 16 * 16
    # Twice each in forward, in backward and in forward again; an all-reduce receives 2 (t - 1)/t = once its operand.
    assert phases["update"].received_bytes == 6 * LAYERS * tokens * HIDDEN * 2
    assert phases["update"].flops == planned(1)[1]["update"].flops / 2


def test_decoding_reads_weights_and_cache_once_a_token():
    plan, phases = planned(1, rollout__slots=16)
    weights, context = (BODY + NORMS + VOCAB * HIDDEN) * 2, 16 + 16 / 2
    kv = 2 * LAYERS * KV * HEAD * 2
    assert phases["generate: responses"].read_bytes == 16 * (weights + 16 * context * kv)
    # Half the slots take twice the steps, each with all the weights.
    half = planned(1, rollout__slots=8)[1]["generate: responses"]
    assert half.read_bytes == 32 * (weights + 8 * context * kv)
    assert planned(2, rollout__slots=16, rollout__mesh__tensor=2, learner__mesh__fsdp=2)[1]["generate: responses"].read_bytes == (
        phases["generate: responses"].read_bytes / 2
    )


def test_publishing_moves_what_is_needed_less_what_is_held():
    bf16 = 2 * ARCH.num_params()
    assert planned(8)[1]["publish"].received_bytes == pytest.approx(bf16 * 7 / 8, rel=0.01)
    assert planned(8, rollout__mesh__tensor=2)[1]["publish"].received_bytes == pytest.approx(bf16 * (1 / 2 - 1 / 8), rel=0.05)
    assert planned(1)[1]["publish"].received_bytes == 0


def test_passes_that_an_algorithm_needs_are_there_and_no_others():
    base = {"generate: prompts", "generate: responses", "update", "publish"}
    assert set(planned(1)[1]) == base
    assert set(planned(1, algorithm__minibatches=2)[1]) == base | {"old logprobs"}
    assert set(planned(1, algorithm__kl_in="loss", algorithm__kl_coef=0.1)[1]) == base | {"reference logprobs"}
    assert set(planned(1, algorithm__name="ppo")[1]) == base | {"values", "update the critic"}


def test_what_waits_with_the_hosts_is_brought_once_an_update_or_a_microbatch():
    far = dict(learner__optimizer_memory="pinned_host", reference__memory="pinned_host", learner__remat="offload")
    kl = dict(algorithm__kl_in="loss", algorithm__kl_coef=0.1)
    (_, near), (plan, phases) = planned(1, **kl), planned(1, **kl, **far)
    b, params = plan.batch, plan.held_bytes["policy: parameters, float32"]
    microbatches = b["microbatches"] * b["minibatches"]
    inputs = 2 * 2 * ARCH.num_layers * ARCH.hidden_size * b["tokens"]
    more = {name: phases[name].link_seconds - near[name].link_seconds for name in phases}
    assert more.pop("update") == pytest.approx(2 * params * b["epochs"] * b["minibatches"] + inputs * b["epochs"])
    assert more.pop("reference logprobs") == pytest.approx(params * microbatches)
    assert not any(more.values())


def test_bounds_enclose_and_phases_add_up():
    plan, phases = planned(8, rollout__mesh__tensor=2)
    for phase in phases.values():
        assert max(phase.busy_seconds, phase.link_seconds) == phase.hidden_seconds
        assert phase.exposed_seconds == phase.busy_seconds + phase.link_seconds
    assert any(phase.hidden_seconds < phase.exposed_seconds for phase in phases.values())
