"""Several policies in one episode, each with a critic, a reward and updates of its own: independent PPO.

Every agent learns as if the others were a part of its environment ("Is Independent Learning All You Need in the StarCraft
Multi-Agent Challenge?", de Witt et al. 2020, arXiv 2011.09533). An episode is a conversation about one prompt, in which the
agents of `config.agents.turns` speak in that order. An agent sees what was said before it: its own words as the assistant's,
those of the others as the user's. At its end each agent's own reward judges the last thing that this agent said, and may read
the whole conversation; what it said earlier in the episode gets the same reward.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jrl import config as config_lib
from jrl.agent_configs import agent_configs, turns
from jrl.data import Example, Prompt, encode
from jrl.errors import UserError
from jrl.run import Interrupted
from jrl.trainer import Trainer
from jrl.types import Batch, Rollout, concatenate

NO_LIMIT = 1 << 30

Turn = dict[str, str]  # {"name": ..., "content": ...}


@dataclasses.dataclass
class Episode:
    """One conversation."""

    question: Prompt
    turns: list[Turn] = dataclasses.field(default_factory=list)


class Agents:
    """Trains the policies of an episode; `Agents(config).train()` is what `python -m jrl.main` runs where there are several.

    Args:
      config: with `agents.turns`; the keys of `agents.options.NAME` hold for that agent alone.
      rewards: name -> function, in place of that agent's `reward.functions`.
      train_data, eval_data: as of `Trainer`.

    Raises:
      UserError: a config that cannot run, before any device work.
    """

    def __init__(self, config, *, rewards: dict[str, Callable] | None = None, train_data: Any = None, eval_data: Any = None):
        config = config_lib.with_python_data(config, train_data is not None, eval_data is not None)
        config_lib.validate(config)
        self.config, self.order = config, turns(config)
        configs = agent_configs(config)
        self.suffixes = {name: c.data.prompt_suffix for name, c in configs.items()}
        for c in configs.values():
            c.data.prompt_suffix = ""  # it comes after the conversation instead, see `seen_by`
        self.agents = {
            name: Trainer(c, reward=(rewards or {}).get(name), train_data=train_data, eval_data=eval_data, speaker=i)
            for i, (name, c) in enumerate(configs.items())
        }
        self.lead = self.agents[self.order[0]]  # whose run counts the steps, draws the prompts and hears the signals

    def train(self) -> dict[str, Any]:
        """Takes the steps that are left, and returns each agent's summary."""
        run, agents = self.lead.run, self.agents
        with run, contextlib.ExitStack() as others:
            for agent in agents.values():
                others.callback(agent.run.checkpoints.close)
            states = self.restore()
            try:
                for name, agent in agents.items():
                    agent.publish(states[name])
                if self.config.eval.at_start and not run.before:
                    for name, scores in self.evaluate().items():
                        agents[name].run.before = scores
                for step in self.steps(states):
                    self.step(step, states)
                for name, agent in agents.items():
                    agent.run.save(states[name])  # whatever goes wrong in the last evaluation shall not cost the weights
                after = self.evaluate()
                return {name: agent.run.finish(states[name], after[name].copy) for name, agent in agents.items()}
            except Interrupted as why:
                for agent in agents.values():
                    agent.parts.engine.abort()
                return {name: agent.run.leave(states[name], why) for name, agent in agents.items()}

    def restore(self) -> dict[str, dict]:
        """The states of all agents; when resuming, of the newest step that every one of them has saved."""
        step = None
        if self.config.resume:
            saved = [set(agent.run.checkpoints.steps()) for agent in self.agents.values()]
            step = max(set.intersection(*saved), default=None)
            if step is None and any(saved):
                raise UserError(
                    f"config.run_dir={self.config.run_dir}: no step was saved by all agents; start anew with resume=False"
                )
        return {name: agent.run.restore(step) for name, agent in self.agents.items()}

    def steps(self, states: dict[str, dict]) -> Iterator[int]:
        """The steps that are left, those of all runs side by side; the first evaluates for all."""
        mine, *others = (
            agent.run.steps(states[name], self.evaluate if agent is self.lead else dict) for name, agent in self.agents.items()
        )
        for step, *_ in zip(mine, *others, strict=True):
            yield step

    def step(self, step: int, states: dict[str, dict]) -> None:
        """Episodes about a step's prompts; then every agent learns from what it said itself, and publishes."""
        for agent in self.agents.values():
            agent.parts.engine.reset_stats()
        batches = self.episodes(self.lead.parts.stream.next(), self.config.rollout.group_size)
        for name, agent in self.agents.items():
            agent.run.record(batches[name])
            batch = agent.advantages(states[name], batches[name])
            metrics = agent.update(step, states[name], batch)
            agent.publish(states[name])
            agent.run.finish_step(step, batch, metrics)

    # Episodes --------------------------------------------------------------------------------------------------------

    def episodes(self, questions: list[Prompt], samples: int, temperature: float | None = None) -> dict[str, Batch]:
        """`samples` episodes about each question: what each agent said in them, one sequence for each of its turns."""
        talks = [Episode(question) for question in questions for _ in range(samples)]
        said: dict[str, list[tuple[list[Prompt], Rollout]]] = {name: [] for name in self.agents}
        for turn, name in enumerate(self.order):
            agent = self.agents[name]
            prompts = self.seen_by(name, talks)
            with agent.run.timers("gen"):
                # Before anything is said, the episodes about a question are alike, and its prompt is computed once.
                alike = samples if turn == 0 else 1
                rollout = agent.generate(prompts[::alike], alike, temperature, first_group=turn * len(talks), judged=False)
            said[name].append((prompts, dataclasses.replace(rollout, prompt_index=np.arange(len(talks)))))
            for talk, text in zip(talks, agent.texts(rollout), strict=True):
                talk.turns.append({"name": name, "content": str(text)})
        return {name: self.scored(name, turns, talks) for name, turns in said.items()}

    def scored(self, name: str, turns: list[tuple[list[Prompt], Rollout]], talks: list[Episode]) -> Batch:
        """All that an agent said, with the reward of the last of it."""
        agent, (prompts, last) = self.agents[name], turns[-1]
        told = [
            dataclasses.replace(p, columns=p.columns | {"transcript": talk.turns}) for p, talk in zip(prompts, talks, strict=True)
        ]
        agent.parts.chats.hold(told)
        with agent.run.timers("reward"):
            final = agent.score(told, last)
        batches = [
            dataclasses.replace(final, rollout=rollout, prompts=_objects(prompts), texts=agent.texts(rollout))
            for prompts, rollout in turns[:-1]
        ]
        batch = concatenate([*batches, final])
        return dataclasses.replace(batch, ids=agent.run.samples - len(batch) + np.arange(len(batch)))

    def seen_by(self, name: str, talks: list[Episode]) -> list[Prompt]:
        """What an agent is asked to continue: the question and what has been said, as a chat in which it is the assistant.

        Where that is longer than its `data.max_prompt_tokens`, the end of the longest message is left out.
        """
        agent = self.agents[name]
        d, tokenizer = agent.config.data, agent.parts.tokenizer

        def prompt(talk: Episode) -> Prompt:
            example = Example(_chat(talk, name, self.suffixes[name]), talk.question.answer, talk.question.columns)
            return encode([example], tokenizer, d.system_prompt, NO_LIMIT, "error", d.use_chat_template)[0]

        return [_shortened(talk, prompt, d.max_prompt_tokens, tokenizer) for talk in talks]

    # Evaluation ------------------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Each agent's held-out accuracy, in sampled and in greedy episodes; nothing without such data."""
        questions, samples = self.lead.parts.eval_prompts, self.config.eval.samples
        if not questions:
            return {name: {} for name in self.agents}
        drawn = {name: agent.run.samples for name, agent in self.agents.items()}
        for agent in self.agents.values():  # the same random numbers every time, and none of the training's
            agent.run.samples = agent.parts.first_eval_sample
        sampled = self.episodes(questions, samples) if samples else {}
        greedy = self.episodes(questions, 1, temperature=0.0)
        for name, agent in self.agents.items():
            agent.run.samples = drawn[name]
        return {name: agent.run.log_eval(sampled.get(name), greedy[name]) for name, agent in self.agents.items()}


def _objects(values: list) -> np.ndarray:
    out = np.empty(len(values), object)
    out[:] = values
    return out


def _chat(talk: Episode, name: str, suffix: str) -> list[dict[str, str]]:
    """Messages by turns of user and assistant; what several others said in a row is one message of the user."""
    chat = [dict(m) for m in talk.question.messages if m["role"] != "system" or m["content"]]
    for turn in talk.turns:
        mine = turn["name"] == name
        role, text = ("assistant", turn["content"]) if mine else ("user", f"{turn['name']}: {turn['content']}")
        if chat and chat[-1]["role"] == role:
            chat[-1]["content"] += f"\n\n{text}"
        else:
            chat.append({"role": role, "content": text})
    if suffix and chat[-1]["role"] == "user":
        chat[-1]["content"] += suffix
    return chat


def _shortened(talk: Episode, prompt: Callable[[Episode], Prompt], limit: int, tokenizer) -> Prompt:
    """The prompt of an episode, of at most `limit` tokens."""
    turns = [dict(turn) for turn in talk.turns]
    made = prompt(talk)
    while len(made.tokens) > limit and any(turn["content"] for turn in turns):
        longest = max(turns, key=lambda turn: len(turn["content"]))
        ids = tokenizer(longest["content"], add_special_tokens=False)["input_ids"]
        longest["content"] = tokenizer.decode(ids[: max(len(ids) - (len(made.tokens) - limit), 0)])
        made = prompt(Episode(talk.question, turns))
    return made
