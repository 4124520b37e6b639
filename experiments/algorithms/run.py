"""Compares algorithms on one task: the same small policy, data, budget and settings, three seeds each.

    python experiments/algorithms/run.py [--algorithms=grpo,ppo,...] [--seeds=3]

Teaches the policy the form of the task first, by supervised examples, then sweeps over the algorithms. What has been
finished is not done again. Writes result.json, table.md and curves.svg beside this file.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import sys

os.environ["JAX_PLATFORMS"] = "cpu"  # here and in the sweep's processes

from jrl import config as config_lib  # noqa: E402
from jrl import logs  # noqa: E402
from jrl.errors import UserError  # noqa: E402
from jrl.supervised import SupervisedTrainer  # noqa: E402
from jrl.sweep.execute import FINISHED, Processes, status_on_disk  # noqa: E402
from jrl.sweep.figure import save_figure  # noqa: E402
from jrl.sweep.grid import Sweep, make_sweep  # noqa: E402
from jrl.sweep.results import ArmResult, Row, by_arm, interval, panels, read_rows  # noqa: E402
from jrl.sweep.run import run  # noqa: E402

HERE = pathlib.Path(__file__).parent
RUNS = pathlib.Path("runs/algorithms")
ALGORITHMS = ("grpo", "dr_grpo", "dapo", "rloo", "remax", "gspo", "cispo", "ppo")
METRIC = f"val-core/{RUNS}/data/eval.jsonl/exact_match/"


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


def swept(algorithms: list[str], seeds: int) -> tuple[Sweep, list[Row]]:
    """The finished runs of all algorithms."""
    sweep = make_sweep(f"{HERE}/config.py", {}, {"algorithm.name": algorithms}, seeds, RUNS / "sweep")
    run(sweep, lambda lock: Processes(1, lock), ["val-core/*"])
    rows = read_rows(sweep, {r.name: status_on_disk(r) for r in sweep.runs})
    if missing := [row.run.name for row in rows if row.status != FINISHED]:
        sys.exit(f"not finished: {'; '.join(missing)}")
    return sweep, rows


def curves(row: Row) -> dict:
    """The held-out accuracy by step of one run, and its seconds."""
    sampled, greedy = row.evals[f"{METRIC}mean@4"], row.evals[f"{METRIC}greedy@1"]
    return {
        "algorithm": row.run.arm.values["algorithm.name"], "seed": row.run.seed, "seconds": row.numbers["seconds"],
        "steps": [step for step, _ in sampled], "sampled": [x for _, x in sampled], "greedy": [x for _, x in greedy],
    }  # fmt: skip


def table(arms: list[ArmResult]) -> str:
    lines = ["| algorithm | sampled at the end | greedy at the end | mean over the run | seconds |", "|---|---|---|---|---|"]
    rows = []
    for arm in arms:
        mine = [curves(row) for row in arm.rows]
        sampled, greedy = ([m[name][-1] for m in mine] for name in ("sampled", "greedy"))
        over_run = [statistics.mean(m["sampled"]) for m in mine]
        cells = " | ".join(f"{mean:.3f} ± {half:.3f}" for mean, half in map(interval, (sampled, greedy, over_run)))
        seconds = statistics.mean(m["seconds"] for m in mine)
        rows.append((statistics.mean(sampled), f"| {mine[0]['algorithm']} | {cells} | {seconds:.0f} |"))
    return "\n".join(lines + [row for _, row in sorted(rows, reverse=True)]) + "\n"


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--algorithms", default=",".join(ALGORITHMS), help="presets, comma separated")
    p.add_argument("--seeds", type=int, default=3)
    args = p.parse_args()
    logs.configure(as_json=False)
    taught()
    try:
        sweep, rows = swept(args.algorithms.split(","), args.seeds)
    except UserError as error:
        sys.exit(f"error: {error}")
    arms = by_arm(sweep, rows)
    (HERE / "result.json").write_text(json.dumps([curves(row) for row in rows]) + "\n")
    (HERE / "table.md").write_text(table(arms))
    save_figure(panels(arms, f"{METRIC}mean@4"), HERE / "curves.svg", "held-out accuracy, sampled")
    print(table(arms))


if __name__ == "__main__":
    main()
