"""Generation alone: prompts x group completions of exact lengths; prints one JSON report.

python benchmarks/rollout.py --model DIR_OR_GGUF --prompts 4 --group 8 --prompt-tokens 64 --completion-tokens 64 --steps 6
python benchmarks/rollout.py --prompts 64 --group 1 --completion-tokens 50 --long-tokens 1000 --long-share 0.05 --slots 16
python benchmarks/rollout.py --temperature 0 --completion-tokens 256 --speculate 4

The second is a long-tailed workload: some completions, drawn at random, are much longer than the others. The third guesses
tokens from the text before them, in the calls of the decode loop where that has been faster. With --engine transformers, tunix
or vllm the same work is done by transformers' generate or Tunix's sampler, in batches of --slots, or by vLLM with as many
sequences under way; each where it is installed, beside what jrl needs, and from a Hugging Face directory.
"""

import time

T0 = time.perf_counter()
import argparse  # noqa: E402
from typing import Any  # noqa: E402

import common  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import peers  # noqa: E402

from jrl import platform  # noqa: E402
from jrl.models.load import load_model, open_model  # noqa: E402
from jrl.models.unstack import worth_it  # noqa: E402
from jrl.rollout.engine import Engine  # noqa: E402
from jrl.rollout.scheduler import Request  # noqa: E402
from jrl.shapes import default_slots  # noqa: E402
from jrl.sharding.layout import Layout  # noqa: E402


def parse_args() -> argparse.Namespace:
    p = common.parser(__doc__.splitlines()[0])
    p.add_argument("--engine", choices=("jrl", *peers.ENGINES), default="jrl")
    p.add_argument("--slots", type=int, default=0, help="sequences decoded at once per replica; 0: all, at most 64")
    p.add_argument("--page-size", type=int, default=16, help="tokens of a page")
    p.add_argument("--decode-chunk", type=int, default=32, help="tokens between two looks of the host")
    p.add_argument("--attention", default="auto", help="attention backend, as rollout.attention")
    p.add_argument("--unroll-layers", choices=("auto", "on", "off"), default="auto", help="as rollout.unroll_layers")
    p.add_argument("--long-tokens", type=int, default=0, help="of the completions that are longer than the others")
    p.add_argument("--long-share", type=float, default=0.0, help="of them among all groups")
    p.add_argument("--speculate", type=int, default=0, help="tokens guessed per slot and pass, where that is faster; 0: none")
    p.add_argument("--temperature", type=float, default=1.0, help="of sampling; 0 is greedy")
    return p.parse_args()


class Workload:
    """What is generated at each step: the same prompts and lengths, other random numbers."""

    def __init__(self, args: argparse.Namespace, tokenizer: Any):
        texts = common.make_texts(tokenizer, args.prompts, args.prompt_tokens, args.text)
        self.prompts = [np.array(tokenizer.encode(t, add_special_tokens=False), np.int32) for t in texts]
        long = np.random.default_rng(0).random(args.prompts) < args.long_share
        self.lengths = np.where(long, args.long_tokens, args.completion_tokens)
        self.temperature = args.temperature
        self.group, self.samples = args.group, args.prompts * args.group
        self.new_tokens = int(self.lengths.sum()) * args.group
        self.longest = args.prompt_tokens + int(self.lengths.max())

    def requests(self, step: int, most: int) -> list[Request]:
        first = step * self.samples
        return [
            Request(p, self.group, min(int(n), most), self.temperature, first + i * self.group, True)
            for i, (p, n) in enumerate(zip(self.prompts, self.lengths, strict=True))
        ]


def generate(engine: Engine, params: Any, work: Workload, step: int, most: int = 1 << 30) -> dict[str, Any]:
    """One run over the workload; every completion cut at `most` tokens."""
    engine.load(params, step)  # as after an update: prompts cached under other weights are not found
    engine.reset_stats()
    requests, began = work.requests(step, most), time.perf_counter()
    engine.submit(requests)
    firsts: dict[tuple[int, int], float] = {}
    done, pages, until_tail = [], [], None
    while not engine.idle:
        finished = engine.step()
        now = time.perf_counter() - began
        done += finished
        for c in (*finished, *engine.running()):
            if len(c.tokens):
                firsts.setdefault((c.request, c.sample), now)
        pages.append(max(r.pages.used for r in engine.scheduler.replicas) / (engine.shape.num_pages - 1))
        if until_tail is None and not engine.scheduler.pending:
            until_tail = engine.stats.metrics()["rollout/slot_use"]
    seconds = time.perf_counter() - began
    assert sorted(len(c.tokens) for c in done) == sorted(r.max_new_tokens for r in requests for _ in range(work.group))
    return {
        "seconds": seconds, "first_token_s": list(firsts.values()), "page_use": max(pages), "slot_use_until_tail": until_tail,
        "stats": engine.stats,
    }  # fmt: skip


def report(
    args: argparse.Namespace, engine: Engine, params: Any, work: Workload, runs: list[dict], one_token: list[dict]
) -> dict:
    seconds, one = [r["seconds"] for r in runs], [r["seconds"] for r in one_token]
    median, stats = float(np.median(seconds)), runs[-1]["stats"]
    firsts = np.concatenate([r["first_token_s"] for r in runs])
    out = {
        "seconds": common.spread(seconds),
        "tokens_per_s": round(work.new_tokens / median, 1),
        "tokens_per_s_best": round(work.new_tokens / min(seconds), 1),
        "time_to_first_token_s": {f"p{q}": round(float(np.percentile(firsts, q)), 4) for q in (50, 95)},
        "one_token_call_s": common.spread(one),
        "slot_use": round(stats.metrics()["rollout/slot_use"], 3),
        "slot_use_until_tail": round(runs[-1]["slot_use_until_tail"], 3),
        "page_use": round(max(r["page_use"] for r in runs), 3),
        "prefill_tokens_saved": round(stats.metrics()["rollout/prefill_saved"], 3),
        "preemptions": stats.preemptions,
        "tokens_per_slot_and_pass": round(stats.decode_tokens / stats.busy_steps, 3),
        "draft_accepted": round(stats.metrics()["rollout/draft_accepted"], 3),
        "speculating": round(stats.metrics()["rollout/speculating"], 3),
    }
    rate, bandwidth = common.matmul_rate(engine.shape.dtype), common.read_bandwidth()
    flops = common.forward_flops(engine.arch, args.prompts * args.prompt_tokens + work.new_tokens, work.new_tokens)
    out |= {
        "matmul_gflops": round(rate / 1e9, 1), "read_gb_per_s": round(bandwidth / 1e9, 1),
        "fraction_of_matmul_rate": round(flops / median / rate, 3),
    }  # fmt: skip
    if not args.speculate and work.samples <= len(engine.scheduler.replicas[0].slots) * engine.replicas and not args.long_share:
        # All slots are busy from the first step to the last, so a step's least time is known.
        step = (median - float(np.median(one))) / max(args.completion_tokens - 1, 1)
        read = sum(x.nbytes for x in jax.tree.leaves(params)) / bandwidth
        multiply = common.forward_flops(engine.arch, work.samples, work.samples) / rate
        out |= {
            "decode_step_ms": round(1e3 * step, 2), "limit_read_weights_ms": round(1e3 * read, 2),
            "limit_multiply_ms": round(1e3 * multiply, 2), "fraction_of_limit": round(max(read, multiply) / step, 3),
        }  # fmt: skip
    return out


def of_peer(args: argparse.Namespace) -> dict:
    """The report of another engine; null is what it does not tell."""
    compiling = common.CompileClock()
    work = Workload(args, open_model(args.model).tokenizer)
    engine, version = peers.make(args.engine, args.model, work, args.slots or default_slots(work.samples, 1))
    startup_s = time.perf_counter() - T0
    first = engine.generate(work)
    engine.generate(work, most=1)
    seconds = [engine.generate(work) for _ in range(args.steps)]
    one = [engine.generate(work, most=1) for _ in range(args.steps)]
    return {
        "version": version,
        "seconds": common.spread(seconds),
        "tokens_per_s": round(work.new_tokens / float(np.median(seconds)), 1),
        "tokens_per_s_best": round(work.new_tokens / min(seconds), 1),
        "time_to_first_token_s": None,
        "one_token_call_s": common.spread(one),
        "slot_use": None,
        "startup_s": round(startup_s, 1),
        "first_call_s": round(first, 1),
        "compile_s": round(compiling.seconds, 1) if args.engine == "tunix" else None,  # the others do not compile with XLA
        "programs": None,
    }


def of_jrl(args: argparse.Namespace) -> dict:
    compiling = common.CompileClock()
    layout, dtype = Layout.rollout({"replica": -1, "tensor": 1}), platform.compute_dtype("auto")
    model = load_model(args.model, layout)
    platform.configure()
    work = Workload(args, model.tokenizer)
    params = jax.tree.map(lambda x: x.astype(dtype), model.params)
    unroll = worth_it(args.unroll_layers, jax.default_backend(), args.completion_tokens)
    engine = Engine(
        model.arch, layout, slots=args.slots or default_slots(work.samples, layout.batch_shards), max_tokens=work.longest,
        eos_ids=model.eos_ids, page_size=args.page_size, decode_chunk=args.decode_chunk, dtype=dtype,
        unroll_layers=unroll, speculate=args.speculate, attention=args.attention,
    )  # fmt: skip
    startup_s = time.perf_counter() - T0
    first = generate(engine, params, work, 0)["seconds"]
    generate(engine, params, work, 1, most=1)
    runs = [generate(engine, params, work, 2 + i) for i in range(args.steps)]
    one_token = [generate(engine, params, work, 100 + i, most=1) for i in range(args.steps)]
    return {
        **report(args, engine, params, work, runs, one_token),
        "startup_s": round(startup_s, 1),
        "first_call_s": round(first, 1),
        "compile_s": round(compiling.seconds, 1),
        "programs": len(engine.compiled),
    }


def main() -> None:
    args = parse_args()
    about = of_jrl(args) if args.engine == "jrl" else of_peer(args)
    common.emit({"benchmark": "rollout", "args": vars(args), **about}, args.json)


if __name__ == "__main__":
    main()
