"""Weak scaling of a GRPO step from 8 to 512 chips: modelled times, and collectives counted in compiled programs.

    pip install -e '.[aot,dev]'
    python experiments/scaling/run.py            # model alone, a minute
    python experiments/scaling/run.py --compile  # and compile for 8, 64 and 256 chips, tens of minutes

Every number of chips has the same work for each: 4 prompts x 8 samples a chip and step. Writes result.json and curve.svg.
"""

import json
import pathlib
import sys

import jax

jax.config.update("jax_platforms", "cpu")

from jrl.config import default_config, override, validate  # noqa: E402
from jrl.models.arch import KNOWN  # noqa: E402
from jrl.plan.aot import compile_programs, topology_devices  # noqa: E402
from jrl.plan.chips import CHIPS  # noqa: E402
from jrl.plan.programs import run_programs  # noqa: E402
from jrl.plan.search import Choice, search  # noqa: E402

HERE = pathlib.Path(__file__).parent
MODEL, CHIP = "Qwen/Qwen2.5-32B", "v5p"
COUNTS = (8, 16, 32, 64, 128, 256, 512)
TOPOLOGIES = {8: "v5p:2x2x2", 64: "v5p:4x4x4", 256: "v5p:8x8x4"}
COMPILED = ("policy.update", "rollout.decode")
GOAL = 0.9


def config(chips: int):
    c = default_config()
    keys = {
        "model.path": MODEL, "data.train": "none", "rollout.prompts_per_step": 4 * chips, "rollout.group_size": 8,
        "data.max_prompt_tokens": 1024, "rollout.max_new_tokens": 2048,
    }  # fmt: skip
    for name, value in keys.items():
        override(c, name, value)
    validate(c)
    return c


def row(chips: int, choice: Choice) -> dict:
    cost = choice.cost
    per_chip = {bound: cost.tokens / chips / getattr(cost, f"{bound}_seconds") for bound in ("hidden", "exposed")}
    return {"chips": chips, "settings": choice.settings, "tokens_per_second_and_chip": per_chip, **cost.to_dict()}


def count(chips: int, choice: Choice) -> list[dict]:
    """What the compiled programs receive on a device; of the model, the same passes."""
    c = choice.applied(config(chips))
    plan, programs = run_programs(c, KNOWN[MODEL], topology_devices(TOPOLOGIES[chips]))
    found = []
    for one in compile_programs(plan, (p for p in programs if p.name.startswith(COMPILED))):
        print(f"{chips} chips: {one.name} compiled in {one.compile_seconds:.0f} s", file=sys.stderr, flush=True)
        found.append({"chips": chips, "microbatches": plan.batch["microbatches"], **one.to_dict()})
    return found


def plot(rows: list[dict], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "jrl"  # the same bytes for the same data
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6))
    chips = [r["chips"] for r in rows]
    labels = {"hidden": "communication all hidden", "exposed": "no communication hidden"}
    for bound, label in labels.items():
        axes.plot(chips, [r["efficiency"][bound] for r in rows], marker="o", label=label)
    axes.axhline(GOAL, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xticks(chips, [str(n) for n in chips])
    axes.set_ylim(0, 1.1)
    axes.set(xlabel=f"{CHIP} chips", ylabel="tokens/s a chip, of the best of fewer chips", title=f"{MODEL}, GRPO step, modelled")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    rows, counted = [], []
    for chips in COUNTS:
        choice = search(config(chips), KNOWN[MODEL], CHIPS[CHIP], chips, keep=1)[0]
        rows.append(row(chips, choice))
        if "--compile" in sys.argv and chips in TOPOLOGIES:
            counted += count(chips, choice)
    best = {"hidden": 0.0, "exposed": 0.0}  # the highest rate of a chip so far: few chips may lack memory, and be slower
    for r in rows:
        now = r["tokens_per_second_and_chip"]
        best = {bound: max(best[bound], now[bound]) for bound in now}
        r["efficiency"] = {bound: now[bound] / best[bound] for bound in now}
    if not counted and (HERE / "result.json").exists():
        counted = json.loads((HERE / "result.json").read_text())["counted"]
    result = {"model": MODEL, "chip": CHIP, "rows": rows, "counted": counted}
    (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(rows, HERE / "curve.svg")
    for r in rows:
        print(r["chips"], {bound: round(x, 3) for bound, x in r["efficiency"].items()}, r["settings"])


if __name__ == "__main__":
    main()
