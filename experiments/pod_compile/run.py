"""Compiles whole GRPO runs for TPU slices on a machine without a TPU, and tabulates what the compiler says.

    pip install -e '.[aot]'
    python experiments/pod_compile/run.py [NAME ...]

Each case takes minutes; what is there already is compiled again. Writes NAME.json for each case, and table.md from all.
"""

import json
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
GIB = 2**30

# name: (model, topology, prompts of a step, prompt tokens, response tokens); 8 samples of each prompt
CASES = {
    "qwen2.5-7b_v5e-4x4": ("Qwen/Qwen2.5-7B", "v5e:4x4", 64, 512, 1024),
    "qwen2.5-7b_v6e-4x4": ("Qwen/Qwen2.5-7B", "v6e:4x4", 128, 1024, 2048),
    "qwen2.5-32b_v5p-4x4x4": ("Qwen/Qwen2.5-32B", "v5p:4x4x4", 256, 1024, 3072),
    "qwen2.5-32b_v5p-8x8x4": ("Qwen/Qwen2.5-32B", "v5p:8x8x4", 1024, 1024, 3072),
    "llama-3-70b_v5p-8x8x4": ("meta-llama/Meta-Llama-3-70B", "v5p:8x8x4", 512, 1024, 3072),
}


def command(name: str) -> list[str]:
    model, topology, prompts, prompt_tokens, response_tokens = CASES[name]
    batch = {
        "rollout.prompts_per_step": prompts, "rollout.group_size": 8, "data.max_prompt_tokens": prompt_tokens,
        "rollout.max_new_tokens": response_tokens,
    }  # fmt: skip
    keys = [f"--config.{key}={value}" for key, value in batch.items()]
    return ["-m", "jrl.plan", f"--model={model}", f"--topology={topology}", *keys, "--top=1", "--compile", "--json"]


def compile_case(name: str) -> None:
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *command(name)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{name}: exit status {done.returncode}")
    found = json.loads(done.stdout)
    found["choices"] = [{key: found["choices"][0][key] for key in ("settings", "cost", "plan")}]
    found["choices"][0]["plan"].pop("programs")
    result = {"case": name, "command": "python " + " ".join(command(name)), "seconds": time.perf_counter() - began, **found}
    (HERE / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def table(results: list[dict]) -> str:
    lines = []
    for r in results:
        model, topology, prompts, prompt_tokens, response_tokens = CASES[r["case"]]
        plan = r["choices"][0]["plan"]
        mesh = lambda name: " ".join(f"{k} {v}" for k, v in plan["meshes"][name].items() if v > 1)  # noqa: E731,B023
        peak = max(c["peak_bytes"] for c in r["compiled"])
        settings = r["choices"][0]["settings"]
        lines += [
            f"## {model} on {topology}", "",
            f"{prompts} prompts x 8 samples, {prompt_tokens} + {response_tokens} tokens. Learner: {mesh('learner')}, microbatch"
            f" {settings['learner.microbatch_tokens']} tokens a shard, remat {settings['learner.remat']}. Rollout:"
            f" {mesh('rollout')}, {settings['rollout.slots']} slots a replica. At most {peak / GIB:.1f} of"
            f" {r['chip']['hbm_bytes'] / GIB:.0f} GiB a device; compiled in {r['seconds'] / 60:.1f} minutes.", "",
            "| program | arguments | temporary | held besides | peak, GiB | received, GiB | collectives | TFLOP |",
            "|---|---|---|---|---|---|---|---|",
        ]  # fmt: skip
        for c in r["compiled"]:
            kinds = ", ".join(f"{kind} {traffic['count']}" for kind, traffic in c["collectives"].items())
            received = sum(traffic["max_bytes"] for traffic in c["collectives"].values())
            temp = c["temp_bytes"] + c["code_bytes"]
            sizes = (c["argument_bytes"], temp, c["beside_bytes"], c["peak_bytes"], received)
            cells = " | ".join(f"{n / GIB:.2f}" for n in sizes)
            lines.append(f"| {c['name']} | {cells} | {kinds} | {c['flops'] / 1e12:.2f} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    names = sys.argv[1:] or list(CASES)
    for name in names:
        if name not in CASES:
            sys.exit(f"{name}: there is no such case; there are {', '.join(CASES)}")
        print(name, file=sys.stderr, flush=True)
        compile_case(name)
    results = [json.loads((HERE / f"{name}.json").read_text()) for name in CASES if (HERE / f"{name}.json").exists()]
    (HERE / "table.md").write_text(table(results))


if __name__ == "__main__":
    main()
