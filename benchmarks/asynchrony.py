"""Wall-clock time of the same GRPO steps, in turn and with generation ahead of learning; prints one JSON report.

python benchmarks/asynchrony.py --model DIR_OR_GGUF --steps 8 --staleness 1

Completions are long-tailed: one prompt in eight has them of --completion-tokens, the others of an eighth of it, in all modes
alike, so all make and learn from as many tokens. On CPU each mode has two virtual devices: in turn both
are shared, ahead one generates and one learns.
"""

import os
import sys
import time

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import dataclasses  # noqa: E402

import common  # noqa: E402
from step import make_trainer  # noqa: E402

from jrl.data import Prompt  # noqa: E402
from jrl.rollout.scheduler import Request  # noqa: E402
from jrl.trainer import Trainer  # noqa: E402


class LongTailed(Trainer):
    """Whose samples end where the workload says, by the number of their group's first sample."""

    def request(self, prompt: Prompt, samples: int, first_id: int, temperature: float | None = None) -> Request:
        asked = super().request(prompt, samples, first_id, temperature)
        long = first_id // self.config.rollout.group_size % 8 == 3
        return dataclasses.replace(asked, max_new_tokens=asked.max_new_tokens if long else max(asked.max_new_tokens // 8, 1))


def seconds_of(args, staleness: int) -> dict:
    """Of the steps after the first two, which compile."""
    keys = {"max_staleness": staleness, "pools__rollout": int(staleness > 0), "eval__at_start": False, "export__hf": False}
    keys["algorithm__rollout_is_cap"] = 2.0 if staleness else 0.0
    trainer = make_trainer(args, 2, LongTailed, **keys)
    steps = trainer.config.steps
    states, ends, tokens = trainer.run.restore(), [], 0
    trainer.generation.start(steps)
    trainer.publish(states)
    batches = trainer.experience(states)
    for step in range(steps):
        batch = next(batches)
        trainer.update(step, states, batch)
        trainer.publish(states)
        trainer.generation.step_done()
        ends.append(time.perf_counter())
        tokens += int(batch.rollout.response_lens.sum())
        print(f"staleness {staleness}: step {step + 1}/{steps}", file=sys.stderr, flush=True)
    trainer.generation.stop()
    trainer.run.checkpoints.close()
    return {"seconds": round(ends[-1] - ends[1], 2), "steps": args.steps, "tokens_of_all_steps": tokens}


def main() -> None:
    parser = common.parser(__doc__.splitlines()[0])
    parser.add_argument("--staleness", type=int, default=1, help="steps that generation may be ahead")
    parser.set_defaults(completion_tokens=128, steps=8, model="random:small")
    args = parser.parse_args()
    found = {"in turn": seconds_of(args, 0), "ahead": seconds_of(args, args.staleness)}
    again = seconds_of(args, 0)  # the machine's speed may have changed in between
    turn = (found["in turn"]["seconds"] + again["seconds"]) / 2
    common.emit(
        {
            "benchmark": "asynchrony", "args": vars(args), **found, "in turn, again": again,
            "in_turn_over_ahead": round(turn / found["ahead"]["seconds"], 3),
        },
        args.json,
    )  # fmt: skip


if __name__ == "__main__":
    main()
