"""Generation alone: prompts x group completions of an exact length; prints one JSON report.

python benchmarks/rollout.py --model DIR_OR_GGUF --prompts 4 --group 8 --prompt-tokens 64 --completion-tokens 64 --steps 6
"""

import time

T0 = time.perf_counter()
import common  # noqa: E402
import numpy as np  # noqa: E402

from jrl import platform  # noqa: E402
from jrl.models.load import load_model  # noqa: E402
from jrl.rollout.engine import Engine  # noqa: E402
from jrl.rollout.scheduler import Request  # noqa: E402
from jrl.shapes import default_slots  # noqa: E402
from jrl.sharding.layout import Layout  # noqa: E402


def main() -> None:
    args, compiling = common.parse_args(__doc__.splitlines()[0]), common.CompileClock()
    layout, dtype = Layout.rollout({"replica": -1, "tensor": 1}), platform.compute_dtype("auto")
    model = load_model(args.model, layout)
    platform.configure()
    n, new = args.prompts * args.group, args.prompts * args.group * args.completion_tokens
    engine = Engine(
        model.arch, layout, slots=default_slots(n, layout.batch_shards), max_tokens=args.prompt_tokens + args.completion_tokens,
        eos_ids=model.eos_ids, dtype=dtype,
    )  # fmt: skip
    texts = common.make_texts(model.tokenizer, args.prompts, args.prompt_tokens, args.text)
    prompts = [np.array(model.tokenizer.encode(t, add_special_tokens=False), np.int32) for t in texts]
    startup_s = time.perf_counter() - T0

    def run(step: int, tokens: int) -> float:
        engine.load(model.params, step)  # as after an update: prompts cached under other weights are not found
        began = time.perf_counter()
        requests = [Request(p, args.group, tokens, 1.0, step * n + i * args.group, True) for i, p in enumerate(prompts)]
        done = engine.generate(requests)
        assert len(done) == n and {len(c.tokens) for c in done} == {tokens}
        return time.perf_counter() - began

    first = run(0, args.completion_tokens)
    run(1, 1)
    engine.reset_stats()
    full = [run(2 + i, args.completion_tokens) for i in range(args.steps)]
    stats = engine.stats
    one = [run(100 + i, 1) for i in range(args.steps)]
    median, rate = float(np.median(full)), common.matmul_rate(dtype)
    flops = common.forward_flops(model.arch, args.prompts * args.prompt_tokens + new, new)
    common.emit(
        {
            "benchmark": "rollout",
            "args": vars(args),
            "seconds": common.spread(full),
            "tokens_per_s": round(new / median, 1),
            "tokens_per_s_best": round(new / min(full), 1),
            "one_token_call_s": common.spread(one),
            "decode_step_ms": round(1e3 * (median - float(np.median(one))) / max(args.completion_tokens - 1, 1), 2),
            "prefill_tokens_saved": round(1 - stats.prefill_tokens / max(stats.prompt_tokens, 1), 3),
            "matmul_gflops": round(rate / 1e9, 1),
            "fraction_of_matmul_rate": round(flops / median / rate, 3),
            "startup_s": round(startup_s, 1),
            "first_call_s": round(first, 1),
            "compile_s": round(compiling.seconds, 1),
            "programs": len(engine.compiled),
        },
        args.json,
    )


if __name__ == "__main__":
    main()
