"""Compares algorithms on one task: the same small policy, data, budget and settings, three seeds each.

    python experiments/algorithms/run.py [--algorithms=grpo,ppo,...] [--seeds=3]

Teaches the policy the form of the task first, by supervised examples, then trains it with each algorithm. What has been
finished is not done again. Writes result.json, table.md and curves.svg beside this file.
"""

import argparse
import json
import logging
import pathlib
import random
import shutil
import statistics
import sys

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_compilation_cache_dir", "runs/algorithms/cache")  # a second seed compiles nothing

from jrl import config as config_lib  # noqa: E402
from jrl.supervised import SupervisedTrainer  # noqa: E402
from jrl.trainer import Trainer  # noqa: E402

HERE = pathlib.Path(__file__).parent
RUNS = pathlib.Path("runs/algorithms")
ALGORITHMS = ("grpo", "dr_grpo", "dapo", "rloo", "remax", "gspo", "cispo", "ppo")
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # Student's, by freedom


def make_data(directory: pathlib.Path) -> None:
    """Words of 5 to 10 random letters, no two alike, each with the reply of one of four teachers.

    The task is to write the word backwards. One teacher in six does; the others copy it, sort it, or stop after three letters.
    """
    directory.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    teachers = (lambda w: w[::-1], lambda w: w, lambda w: "".join(sorted(w)), lambda w: w[:-4:-1])
    words: dict[str, None] = {}
    while len(words) < 20256:
        words["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(5, 10)))] = None
    rows = []
    for word in words:
        reply = draw.choices(teachers, weights=(1, 2, 2, 1))[0](word)
        rows.append(json.dumps({"question": f"{word}>", "answer": word[::-1], "reply": reply}) + "\n")
    (directory / "eval.jsonl").write_text("".join(rows[:256]))
    (directory / "train.jsonl").write_text("".join(rows[256:]))


def taught() -> None:
    """The policy that every arm starts from."""
    if not (RUNS / "sft" / "result.json").exists():
        make_data(RUNS / "data")
        SupervisedTrainer(config_lib.load(f"{HERE}/config.py:sft", {})).train()


def arm(name: str, seed: int) -> dict:
    """The held-out accuracy by step of one run, and its seconds."""
    directory = RUNS / f"{name}-{seed}"
    if not (directory / "result.json").exists():
        print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
        Trainer(config_lib.load(f"{HERE}/config.py", {"algorithm.name": name, "seed": seed, "run_dir": str(directory)})).train()
        shutil.rmtree(directory / "checkpoints")
    curves: dict[str, list] = {"steps": [], "sampled": [], "greedy": []}
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        found = {key.rpartition("/")[2]: value for key, value in row.items() if key.startswith("val-core/")}
        if found:
            curves["steps"].append(row["step"])
            curves["sampled"].append(found["mean@4"])
            curves["greedy"].append(found["greedy@1"])
    return {"algorithm": name, "seed": seed, "seconds": json.loads((directory / "result.json").read_text())["seconds"], **curves}


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95% confidence interval (Student's t over the seeds)."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, float("nan")
    return mean, T_975[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5


def table(arms: list[dict]) -> str:
    lines = ["| algorithm | sampled at the end | greedy at the end | mean over the run | seconds |", "|---|---|---|---|---|"]
    rows = []
    for name in dict.fromkeys(a["algorithm"] for a in arms):
        mine = [a for a in arms if a["algorithm"] == name]
        sampled, greedy, area = (
            interval([f(a) for a in mine])
            for f in (lambda a: a["sampled"][-1], lambda a: a["greedy"][-1], lambda a: statistics.mean(a["sampled"]))
        )
        cells = " | ".join(f"{mean:.3f} ± {half:.3f}" for mean, half in (sampled, greedy, area))
        rows.append((sampled[0], f"| {name} | {cells} | {statistics.mean(a['seconds'] for a in mine):.0f} |"))
    return "\n".join(lines + [row for _, row in sorted(rows, reverse=True)]) + "\n"


def plot(arms: list[dict], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "jrl"  # the same bytes for the same data
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(a["algorithm"] for a in arms))
    figure, grid = plt.subplots(-(-len(names) // 3), 3, figsize=(9, 2.2 * -(-len(names) // 3)), sharex=True, sharey=True)
    everything = {n: [a for a in arms if a["algorithm"] == n] for n in names}
    for axes, name in zip(grid.flat, names, strict=False):
        for other in everything.values():
            means = [statistics.mean(x) for x in zip(*(a["sampled"] for a in other), strict=True)]
            axes.plot(other[0]["steps"], means, color="0.85", lw=0.8)
        mine = everything[name]
        bands = [interval(list(x)) for x in zip(*(a["sampled"] for a in mine), strict=True)]
        axes.plot(mine[0]["steps"], [mean for mean, _ in bands], color="C0")
        axes.fill_between(mine[0]["steps"], [m - h for m, h in bands], [m + h for m, h in bands], alpha=0.25)
        axes.set_title(name, fontsize=9)
        axes.set_ylim(0, 1)
    for axes in grid.flat[len(names) :]:
        axes.axis("off")
    figure.supxlabel("steps", fontsize=9)
    figure.supylabel("held-out accuracy, sampled", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--algorithms", default=",".join(ALGORITHMS), help="presets, comma separated")
    p.add_argument("--seeds", type=int, default=3)
    args = p.parse_args()
    logging.getLogger("jrl").setLevel(logging.WARNING)
    taught()
    arms = [arm(name, seed) for seed in range(args.seeds) for name in args.algorithms.split(",")]
    (HERE / "result.json").write_text(json.dumps(arms) + "\n")
    (HERE / "table.md").write_text(table(arms))
    plot(arms, HERE / "curves.svg")
    print(table(arms))


if __name__ == "__main__":
    main()
