"""A run's programs against the TPU compiler: what the plan says of them, and what the command prints."""

import dataclasses
import json
import math

import jax
import pytest

from jrl.config import default_config, override, validate
from jrl.models.arch import KNOWN, Arch
from jrl.plan.__main__ import main
from jrl.plan.aot import compile_programs, compile_publish, topology_devices
from jrl.plan.programs import abstract_publish, run_programs
from jrl.sharding.factors import needed_minus_held

pytestmark = pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")

SMALL = dataclasses.replace(
    KNOWN["Qwen/Qwen2.5-0.5B"], vocab_size=2048, hidden_size=512, intermediate_size=1024, num_layers=2, num_heads=8,
    num_kv_heads=4, head_dim=128,
)  # fmt: skip
BATCH = {
    "rollout.prompts_per_step": 16, "rollout.group_size": 4, "rollout.max_new_tokens": 128, "data.max_prompt_tokens": 128,
    "learner.mesh.fsdp": 2, "learner.mesh.tensor": 2, "rollout.mesh.tensor": 2, "learner.microbatch_tokens": 2048,
}  # fmt: skip


def config(name: str, keys: dict):
    c = default_config()
    for key, value in {"model.path": name, "data.train": "x.jsonl", **keys}.items():
        override(c, key, value)
    validate(c)
    return c


@pytest.fixture(autouse=True)
def compiler():
    pytest.importorskip("libtpu", reason="the TPU compiler is in the extra `aot`")


def test_the_command_compiles_a_run_for_a_slice(monkeypatch, capsys):
    monkeypatch.setattr("jrl.models.load.read_arch", lambda path: SMALL)
    keys = [f"--config.{key}={value}" for key, value in BATCH.items()]
    assert main(["--model=small", "--topology=v5e:2x2", "--as_configured", "--compile", "--json", *keys]) == 0
    found = json.loads(capsys.readouterr().out)
    plan, programs = found["choices"][0]["plan"], {c["name"]: c for c in found["compiled"]}
    assert set(programs) == {"policy.update", "policy.norm", "policy.apply", "rollout.prefill", "rollout.decode", "publish"}
    held, update = plan["held_bytes"], plan["phase_bytes"]["updating the policy"]
    params, moments = held["policy: parameters, float32"], held["policy: Adam's moments, float32"]
    arguments = {
        "policy.update": params + update["gradients, sum of microbatches"],
        "policy.norm": params,
        "policy.apply": params + moments + update["gradients, sum of microbatches"],
        "publish": params,
    }
    for name, bytes_ in arguments.items():
        assert programs[name]["argument_bytes"] == pytest.approx(bytes_, rel=0.01), name
    # Parameters, moments and the sum of gradients are given back where they were.
    assert all(programs[name]["output_bytes"] < 200_000 for name in ("policy.update", "policy.apply", "rollout.decode"))
    estimate = update["a microbatch at work, estimate"]
    assert programs["policy.update"]["temp_bytes"] <= estimate
    assert programs["policy.update"]["collectives"]["all-gather"]["count"] >= SMALL.num_layers
    assert programs["policy.apply"]["peak_bytes"] >= params + moments + held["rollout: KV pool, bfloat16, at most"]


def test_publishing_on_a_slice_receives_what_is_needed_and_not_held():
    c, devices = config("small", BATCH), topology_devices("v5e:2x2")
    plan, _ = run_programs(c, SMALL, devices)
    tree, shardings, dtype = abstract_publish(c, SMALL, devices)
    compiled = compile_publish(plan, tree, shardings, dtype)
    least = sum(
        needed_minus_held(x.shape, x.sharding, s) * dtype.itemsize
        for x, s in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
    )
    assert sum(t.max_bytes for t in compiled.collectives.values()) == least.max() > 0


# Models and meshes of several kinds; the estimate's count of the head was chosen with a look at the first two.
HELD_OUT: list[tuple[str, str, dict]] = [
    ("Qwen/Qwen2.5-1.5B", "v5e:2x4", {"learner.mesh.fsdp": 4, "learner.mesh.tensor": 2}),
    ("meta-llama/Llama-3.2-3B", "v6e:2x4", {"learner.mesh.fsdp": 8}),
    ("Qwen/Qwen3-8B", "v5p:2x2x2", {"learner.mesh.fsdp": 4, "learner.mesh.context": 2, "learner.remat": "dots"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "topology", "mesh"), HELD_OUT)
def test_an_update_needs_what_the_plan_says(name, topology, mesh):
    arch: Arch = KNOWN[name]
    keys = {"rollout.prompts_per_step": 32, "rollout.max_new_tokens": 512, "learner.microbatch_tokens": 6144}
    devices = topology_devices(topology)
    plan, programs = run_programs(config(name, keys | mesh), arch, devices)
    (update,) = compile_programs(plan, (p for p in programs if p.name == "policy.update"))
    parts = plan.phase_bytes["updating the policy"]
    arguments = plan.held_bytes["policy: parameters, float32"] + parts["gradients, sum of microbatches"]
    assert update.argument_bytes == pytest.approx(arguments, rel=0.01)
    assert 1 <= parts["a microbatch at work, estimate"] / update.temp_bytes <= 1.25
    assert math.isclose(update.peak_bytes, plan.peak_bytes, rel_tol=0.25)
