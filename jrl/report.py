"""report.html: a run on one page that needs nothing but itself. `python -m jrl.report RUN_DIR` writes it again.

The page holds its data as one JSON element and draws everything in the browser; `report.html` beside this file is its
template. Text from prompts, samples and configs reaches the page only inside that JSON, in which `<`, `>` and `&` are
escaped, and the script shows it only as text nodes, so nothing in it can become markup.
"""

import collections
import html
import itertools
import json
import math
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jrl import jsonl
from jrl.algorithms.presets import PRESETS, preset
from jrl.config_keys import KEYS
from jrl.errors import UserError, entry_point
from jrl.metrics import points, read_metrics
from jrl.samples import read_samples
from jrl.svg import COLORS, Curve, picture

FILE = "report.html"
_TEMPLATE = pathlib.Path(__file__).with_name("report.html")

# Together they keep the page below 20 MB.
SAMPLE_BYTES = 12_000_000
METRIC_VALUES = 300_000

# Group, title, the keys in it (a regular expression), how they are drawn: "lines" smoothed, "exact" lines, a "band" of
# mean, max and min, a "stack" of parts of a whole, or "each" in a chart of its own. A key goes to the first row it matches.
_CHARTS: tuple[tuple[str, str, str, str], ...] = (
    ("Reward and accuracy", "Accuracy", r"train/accuracy|val-core/.*", "lines"),
    ("Reward and accuracy", "Score of all samples", r"critic/score/.*", "band"),
    ("Reward and accuracy", "Reward of the samples trained on", r"critic/rewards/.*", "band"),
    ("Reward and accuracy", "", r"val-.*|reward/.*|rollout/.*", "each"),
    ("KL divergence and entropy", "KL to the reference", r"actor/kl_ref", "lines"),
    ("KL divergence and entropy", "KL to the policy before the update", r"actor/ppo_kl", "lines"),
    ("KL divergence and entropy", "Entropy, nats a token", r"actor/entropy", "lines"),
    ("KL divergence and entropy", "", r"actor/kl_.*|actor/ratio_.*|rollout_corr/.*", "each"),
    ("Length", "Response, tokens", r"response_length/(mean|max|min)", "band"),
    ("Length", "Responses cut off at the limit, share", r"response_length/clip_ratio", "lines"),
    ("Length", "Prompt, tokens", r"prompt_length/.*", "band"),
    ("Losses", "Policy loss", r"actor/pg_loss", "lines"),
    ("Losses", "Tokens clipped, share", r"actor/pg_clipfrac.*", "lines"),
    ("Losses", "Gradient norm of the policy", r"actor/grad_norm", "lines"),
    ("Losses", "Value loss", r"critic/vf_loss", "lines"),
    ("Losses", "Explained variance of the critic", r"critic/vf_explained_var", "lines"),
    ("Losses", "Advantages", r"critic/advantages/.*", "band"),
    ("Losses", "Values", r"critic/values/.*", "band"),
    ("Losses", "Returns", r"critic/returns/.*", "band"),
    ("Losses", "Learning rate", r"(actor|critic)/lr", "exact"),
    ("Losses", "", r"(actor|critic)/.*", "each"),
    ("Timing and throughput", "Seconds of a step, by phase", r"timing_s/(?!step$|testing$|save_checkpoint$).*", "stack"),
    ("Timing and throughput", "Whole step, seconds", r"timing_s/step", "lines"),
    ("Timing and throughput", "Tokens a second", r"perf/throughput", "lines"),
    ("Timing and throughput", "Evaluation and checkpoints, seconds", r"timing_s/.*", "exact"),
    ("Timing and throughput", "Compiled programs", r"perf/compiled_programs", "exact"),
    ("Timing and throughput", "", r"perf/.*", "each"),
    ("Other", "", r".*", "each"),
)


def write_report(run_dir: str | os.PathLike) -> pathlib.Path:
    """Writes `report.html` from what the run has left so far: metrics, samples, config and result, the last three if any.

    Returns:
      Where the page is.

    Raises:
      UserError: no metrics.jsonl, or a file with a broken line.
    """
    run_dir = pathlib.Path(run_dir)
    if not (run_dir / "metrics.jsonl").exists():
        raise UserError(f"{run_dir}: holds no metrics.jsonl; give the directory of a run (runs/NAME)")
    values = {"title": html.escape(_name(run_dir)), "data": _embed(report_data(run_dir))}
    page = re.sub(r"\{\{(title|data)\}\}", lambda m: values[m[1]], _TEMPLATE.read_text(encoding="utf-8"))
    part = run_dir / f"{FILE}.part"
    part.write_text(page, encoding="utf-8")
    os.replace(part, run_dir / FILE)
    return run_dir / FILE


def report_data(run_dir: pathlib.Path) -> dict[str, Any]:
    """Everything on the page, as the script in it reads it."""
    train, evals = read_metrics(run_dir)
    notes: list[str] = []
    metrics = {"train": _table(train, notes), "eval": _table(evals, notes)}
    samples = _samples(run_dir, notes)
    return {
        "run": _name(run_dir),
        "metrics": metrics,
        "charts": charts(metrics["train"]["series"], metrics["eval"]["series"]),
        "samples": samples,
        "config": _config(run_dir),
        "result": _read_json(run_dir / "result.json"),
        "notes": notes,
    }


def _name(run_dir: pathlib.Path) -> str:
    return run_dir.resolve().name


def _embed(value: Any) -> str:
    """JSON that can stand inside a script element: it holds no character that means something to an HTML parser."""
    text = jsonl.dumps(value)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# Metrics ---------------------------------------------------------------------------------------------------------------


def _table(rows: Sequence[Mapping[str, Any]], notes: list[str]) -> dict[str, Any]:
    """{"steps": [...], "series": {key: values at the steps, None where there is none}, "nonfinite": {key: [steps]}}."""
    keys = sorted({key for row in rows for key in row} - {"step"})
    stride = math.ceil(len(rows) * len(keys) / METRIC_VALUES) or 1
    if stride > 1:
        notes.append(f"The curves show every {stride}th of {len(rows):,} steps; all are in metrics.jsonl.")
        rows = [row for i, row in enumerate(rows) if i % stride == 0 or i == len(rows) - 1]
    gone = {key: [row["step"] for row in rows if key in row and row[key] is None] for key in keys}
    return {
        "steps": [row["step"] for row in rows],
        "series": {key: [row.get(key) for row in rows] for key in keys},
        "nonfinite": {key: steps for key, steps in gone.items() if steps},
    }


def charts(train: Iterable[str], evals: Iterable[str]) -> list[dict[str, Any]]:
    """The charts of some keys, each key in exactly one: {"group", "title", "style", "lines": [{"key", "label", "kind"}]}."""
    left = [(key, "train") for key in train] + [(key, "eval") for key in evals]
    found = []
    for group, title, pattern, style in _CHARTS:
        mine = [pair for pair in left if re.fullmatch(pattern, pair[0])]
        left = [pair for pair in left if pair not in mine]
        labels = _labels([key for key, _ in mine])
        lines = [{"key": key, "label": labels[key], "kind": kind} for key, kind in mine]
        if style == "each":
            found += [{"group": group, "title": line["key"], "style": "lines", "lines": [line]} for line in lines]
        elif lines:
            found.append({"group": group, "title": title, "style": style, "lines": lines})
    return found


def _labels(keys: Sequence[str]) -> dict[str, str]:
    """Short names: of a held-out metric `val-core/SOURCE/REWARD/METRIC@N` the last part, SOURCE too if there are several."""
    held_out = {key: key.split("/") for key in keys if key.startswith("val-")}
    sources = {key: "/".join(parts[1:-2]) for key, parts in held_out.items()}
    shared = len(os.path.commonprefix([key.split("/")[:-1] for key in keys]))
    labels = {key: "/".join(key.split("/")[shared:]) for key in keys}
    for key, parts in held_out.items():
        labels[key] = " ".join(["held out", *([sources[key]] if len(set(sources.values())) > 1 else []), parts[-1]])
    return labels | ({"train/accuracy": "training samples"} if "train/accuracy" in labels else {})


# Config and result -----------------------------------------------------------------------------------------------------


def _read_json(path: pathlib.Path) -> Any:
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); repair or remove the file") from None


def _config(run_dir: pathlib.Path) -> list[dict[str, Any]]:
    """The resolved config by key, with what each key means and its default."""
    rows = []
    config = dict(_flatten(_read_json(run_dir / "config.json") or {}))
    chosen = preset(config["algorithm.name"]) if config.get("algorithm.name") in PRESETS else {}
    for key, value in config.items():
        row = {"key": key, "value": value}
        if key in KEYS:
            default = KEYS[key].default
            row |= {"default": chosen.get(key.removeprefix("algorithm."), default) if default is None else default}
            row |= {"doc": KEYS[key].doc}
        rows.append(row)
    return rows


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and prefix + name not in KEYS:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


# Samples ---------------------------------------------------------------------------------------------------------------


def _samples(run_dir: pathlib.Path, notes: list[str]) -> dict[str, Any]:
    """The samples by step, as far as `SAMPLE_BYTES` go: what is given up first is the numbers of each token, then the
    later samples of every step, each step having the same number of bytes, then the ends of long texts.

    Returns:
      {"prompts": [text], "parts": [name], "steps": [{"step", "total", "rows"}]}, rows as `_row` and `_tokens` make them.
    """
    totals: collections.Counter[int] = collections.Counter()
    parts: dict[str, None] = {}
    seen: set[int] = set()
    texts = tokens = 0
    for sample in read_samples(run_dir):
        totals[sample["step"]] += 1
        parts |= dict.fromkeys(sample["reward_parts"])
        texts += _bytes(sample, parts, hash(sample["prompt"]) not in seen)
        tokens += len(_embed(_tokens(sample)))
        seen.add(hash(sample["prompt"]))
    with_tokens = texts + tokens <= SAMPLE_BYTES
    allowance = math.inf if texts <= SAMPLE_BYTES else SAMPLE_BYTES / len(totals)

    steps: dict[int, dict[str, Any]] = {s: {"step": s, "total": n, "rows": []} for s, n in sorted(totals.items())}
    room = dict.fromkeys(steps, allowance)
    prompts: dict[str, int] = {}
    shown = cut = 0
    for sample in read_samples(run_dir):
        step, rows = sample["step"], steps[sample["step"]]["rows"]
        size = _bytes(sample, parts, sample["prompt"] not in prompts)
        if size > room[step]:
            if rows:
                continue
            limit = max(200, int(allowance / 4))
            sample = sample | {name: _cut(sample[name], limit) for name in ("prompt", "completion")}
            cut += 1
        room[step] -= size
        row = _row(sample, parts, prompts.setdefault(sample["prompt"], len(prompts)))
        rows.append(row + _tokens(sample) if with_tokens else row)
        shown += 1
    if shown and not with_tokens:
        notes.append("Token ids and log-probabilities are left out here; they are in samples.jsonl.")
    if shown < totals.total():
        notes.append(f"{shown:,} of {totals.total():,} samples are here, the first of every step; all are in samples.jsonl.")
    if cut:
        notes.append(f"Long texts of {cut:,} samples are cut here; they are whole in samples.jsonl.")
    return {"prompts": list(prompts), "parts": list(parts), "steps": list(steps.values())}


def _row(sample: Mapping[str, Any], parts: Iterable[str], prompt: int) -> list[Any]:
    """One sample without its tokens; the script in the template names these places."""
    names = ("group", "completion", "reward", "advantage", "stop_reason", "version", "valid", "uid")
    scores = [sample["reward_parts"].get(name) for name in parts]
    return [prompt, len(sample["tokens"]), scores, *(sample[name] for name in names)]


def _tokens(sample: Mapping[str, Any]) -> list[Any]:
    return [sample["tokens"], [None if x is None else round(x, 2) for x in sample["logprobs"]]]


def _bytes(sample: Mapping[str, Any], parts: Iterable[str], new_prompt: bool) -> int:
    return len(_embed(_row(sample, parts, 0))) + (len(_embed(sample["prompt"])) if new_prompt else 0)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} [... {len(text) - limit:,} more characters]"


# A standalone picture --------------------------------------------------------------------------------------------------


def curve_svg(run_dir: str | os.PathLike, keys: Sequence[str] | Mapping[str, str], title: str) -> str:
    """A picture of some metrics over the steps, as one SVG document on a white ground.

    Metrics of the steps are drawn as they are, faintly, and smoothed; those of evaluations as points.

    Args:
      keys: names of metrics, or their names and what the picture is to call them.

    Raises:
      UserError: a metric of which the run has no finite value.
    """
    labels = dict(keys) if isinstance(keys, Mapping) else {key: key for key in keys}
    train, evals = (points(rows) for rows in read_metrics(run_dir))
    for key in labels:
        if key not in train | evals:
            raise UserError(f"{key}: no such metric in {run_dir}; it has {', '.join(sorted(train | evals))}")
    curves = [
        Curve(label, train.get(key) or evals[key], color, smooth=key in train)
        for color, (key, label) in zip(itertools.cycle(COLORS), labels.items(), strict=False)
    ]
    return picture(curves, title)


@entry_point
def main(args: Sequence[str]) -> None:
    """Writes the report of a run directory."""
    if len(args) != 1 or args[0].startswith("-"):
        raise UserError("usage: python -m jrl.report RUN_DIR")
    print(write_report(args[0]))


if __name__ == "__main__":
    sys.exit(main())
