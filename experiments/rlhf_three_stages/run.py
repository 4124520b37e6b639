"""SmolLM2 through supervised fine-tuning, a reward model and PPO, and a table of what each stage brought.

    python experiments/rlhf_three_stages/run.py

The stages are those of config.py, the training ones each a run of `python -m jrl.main` in `runs/rlhf_three_stages/STAGE`.
Between them this script writes their data: worked answers to training problems for the first, and pairs of a right and a
wrong answer, sampled from the first one's model, for the second. A stage with a result.json is not done again, one that was
interrupted is continued; remove `runs/rlhf_three_stages` to begin anew. Writes result.json and table.md beside itself, or
into `--out`.
"""

import argparse
import itertools
import json
import pathlib
import re
import subprocess
import sys
import time

import numpy as np

from jrl import jsonl
from jrl.build import load_data
from jrl.config import load
from jrl.data import Prompt
from jrl.trainer import Trainer
from jrl.types import Batch

HERE = pathlib.Path(__file__).parent
STAGES = ("base", "sft", "pairs", "reward_model", "ppo", "ppo_verifier")  # see config.py
TRAINED = {"sft", "reward_model", "ppo", "ppo_verifier"}
EXAMPLES = 128  # training problems with worked answers
ASKED, HELD_OUT = 112, 24  # training problems to sample pairs for, of which the last ones are held out of the reward model's
SAMPLES, PAIRS_EACH = 8, 3  # of each of those


class Stages:
    """The stages of one run of the script; each method returns a stage's result, which it makes if it is not there.

    Args:
      runs: directory of everything.
      small: the random model in place of SmolLM2.
    """

    def __init__(self, runs: str, small: bool):
        self.runs, self.small = pathlib.Path(runs), small

    def name(self, stage: str) -> str:
        return f"{HERE}/config.py:stage={stage},runs={self.runs}" + (",tiny" if self.small else "")

    def done(self, stage: str) -> dict | None:
        file = self.runs / stage / "result.json"
        return json.loads(file.read_text()) if file.exists() else None

    def trained(self, stage: str) -> dict:
        """Runs a stage by the command line, on from where it was interrupted."""
        if not self.done(stage):
            say(f"{stage}: starts")
            subprocess.run([sys.executable, "-m", "jrl.main", f"--config={self.name(stage)}", "--config.resume=True"], check=True)
        found = self.done(stage)
        if not found:
            raise SystemExit(f"{stage}: was interrupted; the same command continues it")
        return found

    def measured(self, stage: str) -> dict:
        """Held-out accuracy of a model as it is; in the stage "pairs" besides pairs from its samples, in pairs.jsonl."""
        if found := self.done(stage):
            return found
        say(f"{stage}: starts")
        began, trainer = time.perf_counter(), Trainer(load(self.name(stage), {}))
        with trainer.run:
            trainer.publish(trainer.run.restore())
            result = trainer.evaluate()
            if stage == "pairs":
                result |= self.sample_pairs(trainer)
            trainer.run.close()
        result["seconds"] = round(time.perf_counter() - began, 1)
        (self.runs / stage / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        return result

    def write_examples(self) -> None:
        """Worked answers to the first training problems, in the order in which they were drawn: a few occur twice."""
        train, held_out = load_data(load(self.name("base"), {}), None, None)
        assert not {e.key for e in train} & {e.key for e in held_out}
        rows = [{"question": e.question, "answer": worked(e.question, e.answer)} for e in train[:EXAMPLES]]
        write(self.runs / "examples.jsonl", rows)

    def sample_pairs(self, trainer: Trainer) -> dict:
        """Pairs from samples for training problems, each once in the order in which they were drawn; returns what they are."""
        prompts = list({p.uid: p for p in trainer.parts.train_prompts}.values())[:ASKED]
        batch = trainer.score(prompts, trainer.generate(prompts, SAMPLES))
        splits: dict[str, list[dict]] = {"pairs": [], "pairs_held_out": []}
        lent = 0
        for i, prompt in enumerate(prompts):
            new, borrowed = pairs_of(prompt, batch, batch.rollout.prompt_index == i)
            splits["pairs" if i < len(prompts) - HELD_OUT else "pairs_held_out"] += new
            lent += len(new) * borrowed
        for name, rows in splits.items():
            write(self.runs / f"{name}.jsonl", rows)
        facts = {"problems": len(prompts), "samples_right": float(batch.reward_parts["last_number"].mean())}
        return facts | {name: len(rows) for name, rows in splits.items()} | {"pairs_with_worked_answer": lent}


def pairs_of(prompt: Prompt, batch: Batch, mine: np.ndarray) -> tuple[list[dict], bool]:
    """Up to `PAIRS_EACH` pairs of a right and a wrong answer, no wrong one twice.

    A problem without a right sample lends its worked answer, or the reward model would never see the hard ones; whether it
    did comes second.
    """
    right, wrong = (
        [text for text in dict.fromkeys(batch.texts[mine & (batch.reward_parts["last_number"] == value)]) if text.strip()]
        for value in (1, 0)
    )
    question = prompt.columns["question"]
    better = right or [worked(question, prompt.answer)]
    pairs = zip(itertools.cycle(better), wrong[:PAIRS_EACH], strict=False)
    return [{"prompt": question, "chosen": chosen, "rejected": rejected} for chosen, rejected in pairs], not right


def worked(question: str, answer: str) -> str:
    """What a teacher would write: the problem and its result, such as "3 + 4 - 2 = 5"."""
    return f"{re.search('[0-9].*[0-9]', question)[0]} = {answer}"


def learned_reward(runs: pathlib.Path, stage: str, steps: int = 5) -> dict:
    """The mean reward of the training samples in the first and in the last steps."""
    scores = [row["critic/score/mean"] for row in jsonl.read(runs / stage / "metrics.jsonl") if row["kind"] == "train"]
    return {"reward_first": float(np.mean(scores[:steps])), "reward_last": float(np.mean(scores[-steps:]))}


def write(file: pathlib.Path, rows: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(jsonl.dumps(row) + "\n" for row in rows))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(result: dict) -> str:
    """Markdown; a line for each stage that is done."""
    lines = ["| after | held-out accuracy, sampled | greedy | seconds of the stage | |", "|---|---|---|---|---|"]

    def line(name: str, sampled: float, greedy: float, seconds: float, note: str) -> None:
        lines.append(f"| {name} | {sampled:.3f} | {greedy:.3f} | {seconds:.0f} | {note} |")

    if base := result.get("base"):
        line("nothing: the model as it comes", base["accuracy"], base["greedy"], base["seconds"], "to measure it")
    if pairs := result.get("pairs"):
        sft = result["sft"]
        loss = f"held-out loss {sft['loss_before']:.2f} to {sft['loss_after']:.2f}"
        line("SFT", pairs["accuracy"], pairs["greedy"], sft["seconds"], loss)
        made = f"{pairs['pairs']} pairs and {pairs['pairs_held_out']} held out, and the measurement of SFT"
        lines.append(f"| pairs | | | {pairs['seconds']:.0f} | {made} |")
    if judge := result.get("reward_model"):
        accuracy = f"right about {judge['accuracy_after']:.3f} of the held-out pairs, before {judge['accuracy_before']:.3f}"
        lines.append(f"| reward model | | | {judge['seconds']:.0f} | {accuracy} |")
    for stage, reward in (("ppo", "the reward model"), ("ppo_verifier", "the verifier, for comparison")):
        if run := result.get(stage):
            note = f"mean reward {run['reward_first']:.2f} to {run['reward_last']:.2f}"
            line(f"PPO by {reward}", run["accuracy_after"], run["greedy_after"], run["seconds"], note)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="See the top of this file.")
    parser.add_argument("--runs", default="runs/rlhf_three_stages", help="directory of everything that is trained")
    parser.add_argument("--out", default=str(HERE), help="directory of result.json and table.md")
    parser.add_argument("--tiny", action="store_true", help="a random model and two updates a stage, to try the script")
    options = parser.parse_args()
    stages, out = Stages(options.runs, options.tiny), pathlib.Path(options.out)
    stages.write_examples()
    result = {}
    for stage in STAGES:
        result[stage] = stages.trained(stage) if stage in TRAINED else stages.measured(stage)
        if stage.startswith("ppo"):
            result[stage] |= learned_reward(stages.runs, stage)
        out.mkdir(parents=True, exist_ok=True)
        (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        (out / "table.md").write_text(table(result))
    print((out / "table.md").read_text(), end="")


if __name__ == "__main__":
    main()
