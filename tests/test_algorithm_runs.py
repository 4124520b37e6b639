"""Every preset in a whole run of the tiny model, pieces of the user's own, and what the choices do to a run."""

import jax
import numpy as np
import pytest

from jrl.algorithms.presets import PRESETS, preset
from tests.runs import a_run

SHORT = {"steps": 2, "eval__every_steps": 0, "eval__at_start": False, "checkpoint__every_steps": 0}
BY_DEFAULT = ("dapo", "vapo", "gspo", "remax")


def lower_case(prompts, completions, **columns):
    """The share of lower-case letters: it differs from sample to sample."""
    return [sum("a" <= x <= "z" for x in c) / max(len(c), 1) for c in completions]


def a_preset(folder, name, **changes):
    # Here and there 2e-4 of the tokens would be none; a clip of 3e-4 all of them.
    more = {"algorithm__cov_fraction": 0.05} if name in ("clip_cov", "kl_cov") else {}
    more |= {"algorithm__cov_low": 1e-3} if name == "clip_cov" else {}
    return a_run(folder, "", {"reward": lower_case}, algorithm__name=name, **(SHORT | more | changes))


@pytest.mark.parametrize("name", [x if x in BY_DEFAULT else pytest.param(x, marks=pytest.mark.slow) for x in PRESETS])
def test_every_preset_trains(tmp_path, name):
    trainer = a_preset(tmp_path / "run", name, steps=2, learner__learning_rate=1e-3)
    before = jax.tree.map(np.array, trainer.parts.initial_params)
    states = trainer.run.restore()
    trainer.publish(states)
    batches = trainer.experience(states)
    for step in range(2):
        batch = next(batches)
        metrics = trainer.update(step, states, batch)
        trainer.publish(states)
        assert all(np.isfinite(v) for v in metrics.values()), metrics
        assert metrics["actor/grad_norm"] > 0 and np.any(batch.advantages[batch.loss_mask])
    assert int(states["policy"].step) == 4 and int(states["policy"].skipped) == 0
    assert (states.get("critic") is not None) == (name in ("ppo", "pf_ppo", "vapo"))
    moved = jax.tree.map(lambda a, b: bool(np.any(a != np.asarray(b))), before, states["policy"].params)
    assert all(jax.tree.leaves(moved))
    chosen = {key: trainer.config.algorithm[key] for key in preset(name)}
    others = ("cov_fraction", "cov_low")  # set above
    assert all(chosen[key] == value for key, value in preset(name).items() if key not in others)
