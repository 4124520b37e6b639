"""Compiles a run's programs for chips that need not be there, and reads in what comes out whether they fit.

The TPU compiler is in the package `libtpu`, which runs on any Linux machine; `topology_devices` stand for the chips. What
it answers is exact: these are the programs that a run would execute.
"""

import collections
import dataclasses
import glob
import math
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from jrl.errors import UserError
from jrl.plan.flops import matmul_flops
from jrl.plan.plan import Plan, size_text
from jrl.plan.programs import Program
from jrl.sharding.hlo import Traffic, collective_bytes
from jrl.sharding.reshard import exchanges


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of one program; bytes and operations are those of one device."""

    name: str
    argument_bytes: int
    output_bytes: int  # without those that take the place of donated arguments
    temp_bytes: int
    code_bytes: int
    beside_bytes: int  # what the run holds meanwhile that is no argument
    flops: float  # of matrix products, of the decode loop those of one token, split evenly over the devices
    collectives: dict[str, Traffic]  # loops counted, but of the decode loop one token
    compile_seconds: float

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes + self.temp_bytes + self.code_bytes + self.beside_bytes

    def to_dict(self) -> dict[str, Any]:
        """For json."""
        return {**dataclasses.asdict(self), "peak_bytes": self.peak_bytes}


def topology_devices(name: str) -> list[jax.Device]:
    """The devices of a topology such as "v5p:4x4x4"; they can be compiled for, not computed with.

    Raises:
      UserError: no `libtpu`, or a topology that it does not know.
    """
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server to ask
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip is touched, so other processes may compile as well
    try:
        import libtpu  # noqa: F401
    except ImportError:
        raise UserError(f"--topology={name}: the TPU compiler is missing; pip install 'jrl[aot]'") from None
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except Exception as error:
        raise UserError(f"--topology={name}: {' '.join(str(error).split())[:200]}; give one such as v5p:4x4x4") from None


def compile_programs(plan: Plan, programs: Iterable[Program]) -> Iterator[Compiled]:
    """Compiles one program after another.

    Raises:
      UserError: the compiler refuses a program, as it does where memory does not suffice.
    """
    for program in programs:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            # The text of a TPU's executable cannot always be read back from it, so it is written while compiling.
            options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
            try:
                traced = program.jitted.trace(*program.args)
                executable = traced.lower().compile(compiler_options=options)
            except jax.errors.JaxRuntimeError as error:
                raise UserError(f"{program.name} does not compile: {' '.join(str(error).split())[:400]}") from error
            text = main_text(folder)
        memory = executable.memory_analysis()
        yield Compiled(
            name=program.name,
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            code_bytes=memory.generated_code_size_in_bytes,
            beside_bytes=sum(n for name, n in plan.held_bytes.items() if not name.startswith(program.holds)),
            flops=matmul_flops(traced.jaxpr) / plan.num_devices,
            collectives=collective_bytes(text, unknown_trips=1),
            compile_seconds=time.perf_counter() - began,
        )


def compile_publish(plan: Plan, tree: Any, shardings: Any, dtype: Any) -> Compiled:
    """The programs that move weights from the learner to the rollout, as one: what they move together, one after another.

    Args:
      tree, shardings, dtype: from `jrl.plan.programs.abstract_publish`.
    """
    began = time.perf_counter()
    programs = exchanges(tree, shardings, dtype)
    distinct = collections.Counter(programs.values())  # leaves that are alike share a program
    totals: dict[str, list[float]] = {}
    for program, times in distinct.items():
        for kind, traffic in collective_bytes(program.as_text() or "").items():
            total = totals.setdefault(kind, [0, 0, 0])
            for i, n in enumerate((traffic.count, traffic.mean_bytes, traffic.max_bytes)):
                total[i] += times * n
    memory = {program: program.memory_analysis() for program in distinct}
    shard = lambda x: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize  # noqa: E731
    return Compiled(
        name="publish",
        argument_bytes=sum(map(shard, jax.tree.leaves(tree))),
        output_bytes=sum(times * memory[program].output_size_in_bytes for program, times in distinct.items()),
        temp_bytes=max((m.temp_size_in_bytes for m in memory.values()), default=0),
        code_bytes=sum(m.generated_code_size_in_bytes for m in memory.values()),
        beside_bytes=sum(n for name, n in plan.held_bytes.items() if not name.startswith("policy: parameters")),
        flops=0.0,
        collectives={kind: Traffic(int(count), mean, int(most)) for kind, (count, mean, most) in totals.items()},
        compile_seconds=time.perf_counter() - began,
    )


def main_text(folder: str) -> str:
    """The optimized HLO of the program itself; smaller modules are parts that the compiler took out of it."""
    files = glob.glob(f"{folder}/*after_optimizations.txt")
    with open(max(files, key=os.path.getsize)) as file:
        return file.read()


def table(compiled: Iterable[Compiled]) -> str:
    """For people: a line a program."""
    rows: list[tuple[str, ...]] = [
        ("program", "arguments", "outputs", "temporary", "beside", "peak", "received", "TFLOP", "compiled in")
    ]
    for c in compiled:
        sizes = (c.argument_bytes, c.output_bytes, c.temp_bytes + c.code_bytes, c.beside_bytes, c.peak_bytes)
        received = sum(t.max_bytes for t in c.collectives.values())
        rows.append((c.name, *map(size_text, sizes), size_text(received), f"{c.flops / 1e12:.3f}", f"{c.compile_seconds:.0f} s"))
    return "\n".join("".join(f"{cell:<20}" if i == 0 else f"{cell:>13}" for i, cell in enumerate(row)) for row in rows)
