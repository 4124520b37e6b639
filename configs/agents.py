"""Two policies talk about a problem: one answers, the other checks, and the first answers again. Each learns by PPO from a reward
of its own, with a critic of its own.

The weights are random and nothing is learned: it shows how such a run is set up, in about a minute on a CPU. Give `model.path`
and the data of your own.
"""

from jrl.config import default_config
from jrl.rewards.rules import last_number


def get_config():
    c = default_config()
    c.steps = 3
    c.run_dir = "runs/agents"
    c.model.path = "random:tiny"

    c.data.train = "reasoning_gym:chain_sum"
    c.data.options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    c.data.train_size, c.data.eval_size = 64, 8
    c.data.max_prompt_tokens = 288  # the random model's tokenizer makes one token of each byte

    c.agents.turns = "solver,checker,solver"
    c.agents.options = {
        "solver": {"reward": {"functions": "last_number"}},
        "checker": {
            "reward": {"functions": "configs/agents.py:solver_is_right"},
            "data": {"system_prompt": "Find the mistake in what was said, if there is one."},
        },
    }

    c.algorithm.name = "ppo"
    c.rollout.prompts_per_step, c.rollout.group_size = 4, 4
    c.rollout.max_new_tokens = 16
    c.learner.learning_rate = c.critic.learning_rate = 1e-4
    c.learner.microbatch_tokens = 4096
    c.checkpoint.every_steps = 2
    c.log.print_samples_every = 1
    return c


def solver_is_right(prompts, completions, *, transcript, answer, **_):
    """The checker's reward: 1 where the solver's last word has the right number."""
    said = [[turn["content"] for turn in talk if turn["name"] == "solver"][-1] for talk in transcript]
    return last_number(prompts, said, answer=answer)
