"""A whole GRPO step, split into generate, reward, logprobs, update and publish; prints one JSON report.

python benchmarks/step.py --model DIR_OR_GGUF --prompts 4 --group 8 --prompt-tokens 64 --completion-tokens 32 --steps 6
"""

import time

T0 = time.perf_counter()
import tempfile  # noqa: E402

import common  # noqa: E402
import numpy as np  # noqa: E402

from jrl.config import default_config, override  # noqa: E402
from jrl.models.load import load_model  # noqa: E402
from jrl.trainer import Trainer  # noqa: E402

SPLIT = {"generate": "gen", "reward": "reward", "logprobs": "old_log_prob", "update": "update_actor", "publish": "update_weights"}


def reward(prompts, completions, **_):
    """Cheap, deterministic, and different inside a group, so that advantages are not all 0."""
    return [(sum(map(ord, c)) % 17) / 16 for c in completions]


def make_trainer(args, warm_up: int = 1, kind: type[Trainer] = Trainer, **keys) -> Trainer:
    """Of a run of `args.steps` after `warm_up` ones.

    Args:
      keys: of the config, besides those that the arguments say.
    """
    c, steps = default_config(), args.steps + warm_up
    c.model.path, c.run_dir, c.steps = args.model, tempfile.mkdtemp(prefix="jrl_step_"), steps
    c.rollout.prompts_per_step, c.rollout.group_size = args.prompts, args.group
    c.rollout.max_new_tokens, c.rollout.ignore_eos = args.completion_tokens, True
    c.data.train, c.data.use_chat_template, c.data.max_prompt_tokens = "texts", False, args.prompt_tokens
    c.data.eval_size = 1
    c.learner.microbatch_tokens = args.microbatch_tokens
    c.log.samples = c.log.tensorboard = False
    for name, value in keys.items():
        override(c, name.replace("__", "."), value)
    count = args.prompts * steps + 1
    texts = common.make_texts(load_model(args.model).tokenizer, count, args.prompt_tokens, args.text)
    return kind(c, reward=reward, train_data=[{"question": t, "answer": "0"} for t in texts])


def main() -> None:
    args, compiling = common.parser(__doc__.splitlines()[0]).parse_args(), common.CompileClock()
    trainer = make_trainer(args)
    states = trainer.run.restore()
    trainer.publish(states)
    startup_s = time.perf_counter() - T0
    trainer.run.timers.collect()
    steps, batches = [], trainer.experience(states)
    for step in range(args.steps + 1):
        began = time.perf_counter()
        batch = next(batches)
        trainer.update(step, states, batch)
        trainer.publish(states)
        seconds = time.perf_counter() - began
        assert set(batch.rollout.response_lens.tolist()) == {args.completion_tokens}
        assert set(batch.rollout.prompt_lens.tolist()) == {args.prompt_tokens}
        steps.append({"step": seconds, **{k.removeprefix("timing_s/"): v for k, v in trainer.run.timers.collect().items()}})
    counted = steps[1:]
    n, new = args.prompts * args.group, args.prompts * args.group * args.completion_tokens
    median = float(np.median([s["step"] for s in counted]))
    arch, prompt = trainer.parts.arch, args.prompts * args.prompt_tokens
    rate = common.matmul_rate(trainer.parts.dtype)
    # Least work: each prompt once and each completion token once, to generate (1x) and to learn (3x).
    flops = 4 * common.forward_flops(arch, prompt + new, new)
    common.emit(
        {
            "benchmark": "step",
            "args": vars(args),
            "seconds_per_step": common.spread([s["step"] for s in counted]),
            "split_s": {k: common.spread([s.get(v, 0.0) for s in counted]) for k, v in SPLIT.items()},
            "samples_per_s": round(n / median, 3),
            "generated_tokens_per_s": round(new / median, 1),
            "generated_tokens_per_s_generation_only": round(new / float(np.median([s["gen"] for s in counted])), 1),
            "matmul_gflops": round(rate / 1e9, 1),
            "fraction_of_matmul_rate": round(flops / median / rate, 3),
            "startup_s": round(startup_s, 1),
            "first_step_s": round(steps[0]["step"], 1),
            "compile_s": round(compiling.seconds, 1),
            "programs": len(trainer.parts.policy.compiled) + len(trainer.parts.engine.compiled),
        },
        args.json,
    )


if __name__ == "__main__":
    main()
