"""The planner's choices: that they fit, that they are the best of those there are, and what the command says."""

import dataclasses
import itertools
import json

import pytest

from jrl.config import default_config, override, validate
from jrl.errors import UserError
from jrl.models.arch import KNOWN
from jrl.plan.__main__ import main
from jrl.plan.chips import CHIPS
from jrl.plan.search import USABLE_SHARE, choose, search, search_apart

NAME = "Qwen/Qwen2.5-0.5B"
ARCH = KNOWN[NAME]


def config(**overrides):
    c = default_config()
    given = {"model.path": NAME, "data.train": "x.jsonl", "rollout.prompts_per_step": 16, "rollout.max_new_tokens": 512}
    for name, value in (given | {name.replace("__", "."): value for name, value in overrides.items()}).items():
        override(c, name, value)
    validate(c)
    return c


def test_the_first_choice_beats_every_mesh_by_hand_that_fits():
    c, chip = config(), CHIPS["v5e"]
    limit = chip.hbm_bytes * USABLE_SHARE
    choices = search(c, ARCH, chip, 4)
    assert [x.seconds for x in choices] == sorted(x.seconds for x in choices)
    assert all(x.plan.peak_bytes <= limit for x in choices)
    seen = 0
    for (fsdp, tensor), rollout_tensor, slots, tokens, remat in itertools.product(
        ((4, 1), (2, 2), (1, 2)), (1, 2), (16, 64), (1024, 4608, 9216), ("none", "full")
    ):
        settings = {
            "learner.mesh.data": 4 // fsdp // tensor, "learner.mesh.fsdp": fsdp, "learner.mesh.tensor": tensor,
            "rollout.mesh.tensor": rollout_tensor, "rollout.mesh.replica": 4 // rollout_tensor, "rollout.slots": slots,
            "learner.microbatch_tokens": tokens, "learner.remat": remat,
        }  # fmt: skip
        by_hand = choose(c, ARCH, chip, 4, settings)
        if by_hand.plan.peak_bytes <= limit:
            seen += 1
            assert choices[0].seconds <= by_hand.seconds
    assert seen > 10


def test_less_memory_makes_leaner_and_slower_choices_until_none_fits():
    c, chip, last = config(), CHIPS["v5e"], 0.0
    for gib in (16, 6, 3.8):
        small = dataclasses.replace(chip, hbm_bytes=gib * 2**30)
        best = search(c, ARCH, small, 4, keep=1)[0]
        assert best.plan.peak_bytes <= small.hbm_bytes * USABLE_SHARE and best.seconds >= last
        last = best.seconds
    with pytest.raises(UserError, match=r"does not fit 4 x v5e: the leanest choice needs [\d.]+ GiB of"):
        search(c, ARCH, dataclasses.replace(chip, hbm_bytes=2 * 2**30), 4)


def test_devices_of_their_own_take_the_slower_sides_time():
    c = config()
    apart = search_apart(c, ARCH, CHIPS["v5e"], 8)
    assert apart.learner_devices + apart.rollout_devices == 8
    together = search(c, ARCH, CHIPS["v5e"], 8, keep=1)[0]
    sides = search(c, ARCH, CHIPS["v5e"], 4, keep=1)[0]  # either half is at most all that a half has to do
    assert together.seconds / 2 < apart.seconds < sides.seconds


def run(capsys, *args):
    status = main(args)
    out = capsys.readouterr()
    return status, out.out, out.err


BATCH = ("--config.rollout.prompts_per_step=16", "--config.rollout.max_new_tokens=512")


def test_the_command_prints_what_it_found(capsys):
    status, out, _ = run(capsys, f"--model={NAME}", "--chip=v5e", "--chips=4", *BATCH, "--json")
    found = json.loads(out)
    assert status == 0 and found["chips"] == 4 and found["chip"]["name"] == "v5e"
    best = search(config(), ARCH, CHIPS["v5e"], 4, keep=1)[0]
    assert found["choices"][0]["settings"] == best.settings
    assert found["choices"][0]["cost"]["exposed_seconds"] == pytest.approx(best.cost.exposed_seconds)
    status, text, _ = run(capsys, f"--model={NAME}", "--topology=v5e:2x2", *BATCH)
    assert status == 0
    for name, value in best.settings.items():
        assert f"--config.{name}={value}" in text
    status, text, _ = run(capsys, f"--model={NAME}", "--topology=v5e:2x2", "--as_configured", "--config.learner.mesh.tensor=2")
    assert status == 0 and "fsdp=2 context=1 tensor=2" in text and "fastest first" not in text


FOUR = [f"--model={NAME}", "--chip=v5e", "--chips=4"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--chip=v5e", "--chips=4"], "--model is missing"),
        ([f"--model={NAME}"], "--chip and --chips are needed"),
        ([f"--model={NAME}", "--chip=v7", "--chips=4"], "--chip=v7: not known"),
        ([*FOUR, "--topology=v5e:2x2"], "leave out --chip"),
        ([f"--model={NAME}", "--topology=v5e:2xtwo"], "sizes of its slice"),
        ([*FOUR, "--compile"], "for which slice"),
        ([f"--model={NAME}", "--chip=v5e", "--chips=-4"], "--chips=-4"),
        ([*FOUR, "--config.rollout.slot=3"], "did you mean"),
        (["--model=nowhere", "--chip=v5e", "--chips=4"], "model.path=nowhere: no such file"),
        ([*FOUR, "--config.max_staleness=1", "--config.rollout.workers=2"], "rollout.workers=2: nothing is known"),
        ([*FOUR, "--config.max_staleness=1", "--config.pools.rollout=2"], "config.pools.rollout: meshes are chosen over all"),
    ],
)
def test_mistakes_are_one_line(capsys, args, message):
    status, out, err = run(capsys, *args)
    assert status == 2 and not out and err.count("\n") == 1 and message in err
