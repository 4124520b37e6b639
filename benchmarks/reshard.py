"""Publishing a whole model from the train layout to the rollout layout: bytes that a device receives, memory, seconds.

    python benchmarks/reshard.py                                   # 8 virtual CPU devices, SmolLM2-135M
    python benchmarks/reshard.py --topology=v5p:4x4x4 --model=Qwen/Qwen2.5-32B --pairs=16x4:8x8,64x1:8x8

For every pair of meshes: ours; a jitted identity, which leaves the choice to XLA's partitioner; `jax.device_put`, of which
no compiled program tells what it sends; and what HybridFlow's 3D-HybridEngine does by its paper (https://arxiv.org/abs/2409.19256,
table 2): with M bytes of weights on N devices and t rollout tensor shards a device receives M/t - M/N and peaks at M/t.
A pair is [DATAx]FSDPxTENSOR:REPLICAxTENSOR. Bytes are read from compiled programs, "least" is needed minus held.
With --topology nothing runs: the programs are compiled for chips that are not there.
"""

import argparse
import os
import statistics
import sys
import time
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np

from jrl.models import decoder
from jrl.models.arch import KNOWN, Arch
from jrl.plan.aot import topology_devices
from jrl.sharding.exchange import CHUNK_BYTES
from jrl.sharding.factors import needed_minus_held
from jrl.sharding.hlo import collective_bytes, received_bytes
from jrl.sharding.layout import Layout
from jrl.sharding.reshard import exchanges, reshard

PAIRS = "8x1:8x1,8x1:4x2,8x1:1x8,4x2:4x2,4x2:2x4,2x4:4x2,2x4:1x8,2x2x2:2x4"
MIB = 2**20


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M", help="whose shapes to use; weights are random")
    p.add_argument("--pairs", default=PAIRS, help="with commas between them")
    p.add_argument("--devices", type=int, default=8, help="virtual CPU devices, where there are no others")
    p.add_argument("--topology", default="", help="compile for this one, such as v5p:4x4x4, and run nothing")
    p.add_argument("--have", default="float32", help="dtype of the trained weights")
    p.add_argument("--want", default="bfloat16", help="dtype of the published ones")
    p.add_argument("--chunk-mib", type=int, default=CHUNK_BYTES // MIB)
    p.add_argument("--steps", type=int, default=5, help="counted ones come after a first")
    p.add_argument("--json", default="", help="also write the report here")
    return p.parse_args()


def layouts(pair: str, devices: Any) -> tuple[Layout, Layout]:
    train, rollout = ([int(n) for n in side.split("x")] for side in pair.split(":"))
    axes = ("data", "fsdp", "tensor")[-len(train) :]
    to = dict(zip(("replica", "tensor"), rollout, strict=True))
    return Layout.train(dict(zip(axes, train, strict=True)), devices), Layout.rollout(to, devices)


def placed(arch: Arch, layout: Layout, dtype: Any) -> tuple[Any, Any]:
    """Shapes with shardings, and the shardings alone, of every weight."""
    shapes = decoder.abstract_params(arch)
    shardings = layout.tree(decoder.param_axes(arch), shapes)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, dtype, sharding=s), shapes, shardings), shardings


def identity(shapes: Any, targets: Any, dtype: Any) -> Any:
    """One program for the whole tree, the cast pinned before the move."""

    def run(tree: Any) -> Any:
        return jax.tree.map(lambda x, s: jax.lax.with_sharding_constraint(x.astype(dtype), s.sharding), tree, shapes)

    return jax.jit(run, out_shardings=targets).lower(shapes).compile()


def traffic(programs: list[Any]) -> dict[str, Any]:
    """What devices receive in all of the programs together, and the memory of the one that takes most beside its result."""
    texts = [program.as_text() for program in programs]
    received = np.sum([received_bytes(text) for text in texts], axis=0)
    kinds: dict[str, int] = {}
    for text in texts:
        for kind, t in collective_bytes(text).items():
            kinds[kind] = kinds.get(kind, 0) + t.count
    temp = max(program.memory_analysis().temp_size_in_bytes for program in programs)
    return {
        "received_max": int(received.max()), "received_mean": float(received.mean()), "temp": int(temp), "collectives": kinds,
    }  # fmt: skip


def timed(move: Any, params: Any, steps: int) -> tuple[dict[str, float], Any]:
    seconds = []
    for _ in range(steps + 1):
        began = time.perf_counter()
        moved = jax.block_until_ready(move(params))
        seconds.append(time.perf_counter() - began)
    return {"median": round(statistics.median(seconds[1:]), 4), "min": round(min(seconds[1:]), 4)}, moved


def measure(args: argparse.Namespace, arch: Arch, pair: str, devices: Any) -> dict[str, Any]:
    train, rollout = layouts(pair, devices)
    have, want = jnp.dtype(args.have), jnp.dtype(args.want)
    chunk_bytes = args.chunk_mib * MIB
    (shapes, _), (_, targets) = placed(arch, train, have), placed(arch, rollout, want)
    wire = min(have.itemsize, want.itemsize)
    leaves, wanted = jax.tree.leaves(shapes), jax.tree.leaves(targets)
    least = sum(needed_minus_held(x.shape, x.sharding, s) * wire for x, s in zip(leaves, wanted, strict=True))
    whole = sum(x.size for x in leaves) * wire
    ours = exchanges(shapes, targets, want, chunk_bytes)
    partitioner = identity(shapes, targets, want)
    n, t = train.mesh.size, rollout.mesh.shape["tensor"]
    row = {
        "pair": pair, "weights": whole, "least_max": int(least.max()), "least_mean": float(least.mean()),
        "ours": traffic(list(ours.values())), "identity": traffic([partitioner]),
        "device_put": {}, "hybridflow": {"received_max": whole // t - whole // n, "peak": whole // t},
    }  # fmt: skip
    if not args.topology:
        params = decoder.init_params(arch, 0, train)
        params = jax.tree.map(lambda x: x.astype(have), params)
        moves = {
            "ours": lambda p: reshard(p, targets, want, chunk_bytes),
            "identity": partitioner,
            "device_put": lambda p: jax.device_put(jax.tree.map(lambda x: x.astype(want), p), targets),
        }
        host = [np.asarray(x.astype(want)) for x in jax.tree.leaves(params)]
        for name, move in moves.items():
            row[name]["seconds"], moved = timed(move, params, args.steps)
            pairs = zip(jax.tree.leaves(moved), host, strict=True)
            row[name]["values_equal"] = all(np.array_equal(np.asarray(x), y) for x, y in pairs)
            del moved
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Received in MiB and as a multiple of the least, both of the device that receives most; temporary memory in MiB."""
    lines = [
        f"{'':<12}{'least':>9}   {'ours':<32}{'identity':<32}{'device_put':<12}HybridFlow",
        f"{'pair':<12}{'MiB':>9}   {'received    of least  temp':<32}{'received    of least  temp':<32}{'':<12}received",
    ]
    for row in rows:
        least = max(row["least_max"], 1)
        line = f"{row['pair']:<12}{row['least_max'] / MIB:>9.1f}   "
        for name in ("ours", "identity"):
            r = row[name]
            line += f"{r['received_max'] / MIB:<12.1f}{r['received_max'] / least:<10.3f}{r['temp'] / MIB:<10.1f}"
        put = row["device_put"].get("seconds", {}).get("median")
        line += f"{'' if put is None else f'{put:.2f} s':<12}{row['hybridflow']['received_max'] / MIB:.1f}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    args = arguments()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={args.devices}"
    if args.topology:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    devices = topology_devices(args.topology) if args.topology else None
    arch, rows = KNOWN[args.model], []
    for pair in args.pairs.split(","):
        rows.append(measure(args, arch, pair, devices))
        print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(rows))
    common.emit({"benchmark": "reshard", "args": vars(args), "rows": rows}, args.json)


if __name__ == "__main__":
    main()
