"""Several policies in one episode: who sees what, who learns from what, by whose reward, and what a resume continues."""

import numpy as np
import pytest

from jrl.agent_configs import agent_configs, turns
from jrl.agents import Agents, Episode, _shortened
from jrl.config import load
from jrl.data import Prompt
from jrl.errors import UserError
from jrl.trainer import Trainer
from tests.runs import ROOT, assert_same_runs, lines

AGENTS = f"{ROOT}/configs/agents.py"
QUIET = {"log.tensorboard": False, "export.hf": False, "log.print_samples_every": 0, "log.samples": True}
REWARD = f"{ROOT}/configs/agents.py:solver_is_right"
SMALL = QUIET | {
    "rollout.prompts_per_step": 2, "rollout.group_size": 2, "rollout.max_new_tokens": 8, "data.max_prompt_tokens": 224,
    "checkpoint.every_steps": 1, "checkpoint.keep": 9, "data.eval_size": 2, "agents.options.checker.reward.functions": REWARD,
}  # fmt: skip


def config(folder, **changes):
    return load(AGENTS, SMALL | {"run_dir": str(folder)} | {k.replace("__", "."): v for k, v in changes.items()})


def letters(prompts, completions, *, transcript, **_):
    """A reward that differs from sample to sample, of this agent's own last word."""
    assert all(talk[-1]["content"] == completion for talk, completion in zip(transcript, completions, strict=True))
    return [float(len(set(c)) % 5) for c in completions]


def words_of_others(prompts, completions, *, transcript, **_):
    return [float(len(talk[0]["content"])) for talk in transcript]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps, of which the checker's policy may learn nothing."""
    folder = tmp_path_factory.mktemp("agents")
    changes = {"steps": 2, "agents.options.checker.learner.learning_rate": 0.0}
    agents = Agents(config(folder, **changes), rewards={"solver": letters, "checker": words_of_others})
    before = {name: agent.parts.initial_params["embed"]["embedding"] + 0 for name, agent in agents.agents.items()}
    seen = []
    original = agents.scored
    agents.scored = lambda name, spoken, talks: seen.append((name, spoken, talks)) or original(name, spoken, talks)
    return folder, agents, before, agents.train(), seen


def test_each_agent_sees_what_was_said_before_and_speaks_for_itself(run):
    _, agents, _, _, seen = run
    name, spoken, talks = next(x for x in seen if x[0] == "solver" and len(x[2]) == 4)
    assert [turn["name"] for turn in talks[0].turns] == ["solver", "checker", "solver"] and len(spoken) == 2
    (first, _), (second, _) = spoken
    checker = next(s for n, s, t in seen if n == "checker" and t is talks)[0][0]
    for talk, a, b, c in zip(talks, first, checker, second, strict=True):
        roles = [[m["role"] for m in p.messages if m["role"] != "system"] for p in (a, b, c)]
        assert roles == [["user"], ["user"], ["user", "assistant", "user"]]
        assert talk.question.messages[-1]["content"] == a.messages[-1]["content"]
        assert b.messages[-1]["content"].endswith(f"solver: {talk.turns[0]['content']}")
        assert "mistake" in b.messages[0]["content"] and "mistake" not in a.text + c.text
        assert c.messages[-2]["content"] == talk.turns[0]["content"]
        assert c.messages[-1]["content"] == f"checker: {talk.turns[1]['content']}"


def test_rewards_that_render_prompts_anew_know_who_said_what(run):
    _, agents, _, _, seen = run
    for name, agent in agents.agents.items():
        prompts = next(spoken[-1][0] for n, spoken, _ in reversed(seen) if n == name)
        assert all(agent.parts.chats.of(p.text) == p.messages for p in prompts)
        assert ("assistant" in [m["role"] for m in prompts[0].messages]) == (name == "solver")


def test_each_learns_from_its_own_words_by_its_own_reward(run):
    folder, agents, before, result, seen = run
    rows = {name: lines(folder / name / "samples.jsonl") for name in agents.agents}
    assert len(rows["solver"]) == 2 * len(rows["checker"]) == 2 * 4 * 2
    _, _, talks = next(x for x in seen if x[0] == "checker" and len(x[2]) == 4)
    assert [r["reward"] for r in rows["checker"][:4]] == [len(talk.turns[0]["content"]) for talk in talks]
    # The two things that the solver said in an episode get one reward: that of the second.
    wanted = [float(len(set(talk.turns[2]["content"])) % 5) for talk in talks]
    assert [r["reward"] for r in rows["solver"][:8]] == wanted + wanted and len(set(wanted)) > 1
    assert [r["completion"] for r in rows["solver"][:4]] == [talk.turns[0]["content"] for talk in talks]
    last = {name: lines(folder / name / "metrics.jsonl")[-2] for name in agents.agents}
    assert result.keys() == agents.agents.keys() and all(r["steps"] == 2 for r in result.values())
    for name, agent in agents.agents.items():
        step, states, _ = agent.run.checkpoints.restore(agent.run.abstract_states())
        moved = float(np.abs(states["policy"].params["embed"]["embedding"] - before[name]).max())
        assert step == 2 and (moved > 0) == (name == "solver"), name
        assert last[name]["critic/vf_explained_var"] <= 1 and last[name]["actor/grad_norm"] > 0


def test_agents_draw_random_numbers_of_their_own(run):
    """Two agents of the same weights and prompt would say the same otherwise."""
    _, agents, *_ = run
    solver, checker = agents.agents.values()
    prompts = solver.parts.train_prompts[:2]
    said = []
    for agent in (solver, checker):
        agent.run.samples = 0
        agent.parts.engine.load(agents.lead.parts.engine.params, 99)
        said.append(agent.generate(prompts, 4, judged=False).tokens.tobytes())
    assert said[0] != said[1]


@pytest.mark.slow
def test_a_resumed_run_is_the_unbroken_one(run, tmp_path):
    folder, agents, *_ = run
    rewards = {"solver": letters, "checker": words_of_others}
    changes = {"agents.options.checker.learner.learning_rate": 0.0}
    Agents(config(tmp_path, steps=2, **changes), rewards=rewards).train()
    (tmp_path / "solver" / "checkpoints" / "2").rename(tmp_path / "lost")  # killed between the saves of the two
    Agents(config(tmp_path, steps=2, resume=True, **changes), rewards=rewards).train()
    for name in agents.agents:
        assert_same_runs(folder / name, tmp_path / name, 2)


def test_a_long_conversation_is_cut_where_it_is_longest():
    class Tokenizer:
        def __call__(self, text, add_special_tokens):
            return {"input_ids": list(text)}

        def decode(self, ids):
            return "".join(ids)

    question = Prompt((), "q", (), None, {}, "")
    talk = Episode(question, [{"name": "a", "content": "x" * 30}, {"name": "b", "content": "y" * 10}])
    prompt = lambda t: Prompt(tuple("q" + "".join(turn["content"] for turn in t.turns)), "", (), None, {}, "")  # noqa: E731
    assert "".join(_shortened(talk, prompt, 25, Tokenizer()).tokens) == "q" + "x" * 14 + "y" * 10
    assert len(_shortened(talk, prompt, 41, Tokenizer()).tokens) == 41 and talk.turns[0]["content"] == "x" * 30


def test_every_agent_has_a_config_of_its_own(tmp_path):
    c = config(tmp_path, agents__options__checker__learner__learning_rate=1e-6)
    configs = agent_configs(c)
    assert turns(c) == ["solver", "checker", "solver"] and list(configs) == ["solver", "checker"]
    assert [own.learner.learning_rate for own in configs.values()] == [1e-4, 1e-6]
    assert [own.run_dir for own in configs.values()] == [f"{tmp_path}/solver", f"{tmp_path}/checker"]


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("agents.options.judge.seed", 3, "agents.options.judge: agents.turns='solver,checker,solver' has no such agent"),
        (
            "agents.options.solver.learner.learning_rat",
            3,
            "agents.options.solver: config.learner.learning_rat=3: there is no",
        ),
        ("agents.options.solver.seed", 3, "agents.options.checker.seed=0: is the same for all agents"),
        ("algorithm.name", "grpo", "several agents learn by critics of their own"),
        ("agents.turns", "a b", "must be names"),
        ("agents.turns", "", "there are no agents"),
    ],
)
def test_mistakes_are_told(tmp_path, key, value, told):
    with pytest.raises(UserError, match=told.replace(".", r"\.")):
        agent_configs(config(tmp_path, **{key: value}))


def test_one_policy_has_another_trainer(tmp_path):
    with pytest.raises(UserError, match="use jrl.agents.Agents"):
        Trainer(config(tmp_path))
