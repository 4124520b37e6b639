"""A reward that one agent gets for what another one says."""

from jrl.rewards.rules import last_number


def solver_is_right(prompts, completions, *, transcript, answer, **_):
    """1 where the solver's last word has the right number, whoever is asked."""
    said = [[turn["content"] for turn in talk if turn["name"] == "solver"][-1] for talk in transcript]
    return last_number(prompts, said, answer=answer)
