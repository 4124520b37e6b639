"""What a compiled program sends between devices, read from its HLO text.

    collective_bytes(jax.jit(f).lower(x).compile().as_text())
    {"all-gather": Traffic(count=32, mean_bytes=..., max_bytes=...), ...}

A device receives, each time that it takes part in a collective among k devices, with B bytes of operands on each device:

    all-gather            (k - 1) B
    reduce-scatter        (k - 1)/k B
    all-reduce            2 (k - 1)/k B     a reduce-scatter and an all-gather of the sums
    all-to-all            (k - 1)/k B       a ragged one as if its rows were spread evenly
    collective-permute    B                 where it is the target of another device
    collective-broadcast  B                 unless it is the source

These are the least that the operation can do with, whatever the algorithm; a ring attains them. Collectives inside a loop
count once a trip. Trip counts are those that the compiler wrote down (`known_trip_count`), or follow from the loop's scalars
where it did not, as on TPU. What is inside conditionals counts as in the branch that receives most.

Three ways in which compilers write one collective in several places are undone: asynchronous pairs (`all-gather-start`,
`all-gather-done`, or `async-start` around a computation), a TPU's fusions that carry one collective through several steps of
other work (all of them name its channel), and a TPU's reduce-scatter, written as an all-reduce and a slice inside a fusion
(which is the whole of it: several of these may name one channel, and each counts).

Left out: send and recv, and copies to and from the host.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

KINDS = (
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all",
    "reduce-scatter",
)  # fmt: skip

_BITS = {"pred": 8, "token": 0, "opaque": 0}  # other types end in their width, but for fp8's: f8e4m3fn
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([^\]]*)\]")
_SCATTER = "all-reduce-scatter"  # in the name of a TPU's fusion that is a whole reduce-scatter
_OPERAND = re.compile(r"%([^\s,()]+)")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """All collectives of one kind in one run of a program."""

    count: int  # collectives executed, every trip of a loop counted
    mean_bytes: float  # received by a device, mean over devices
    max_bytes: int  # received by the device that receives most


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the text."""

    kind: str
    name: str
    channel: int | None  # the same for all parts of one collective
    times: int  # how often it runs in one run of the program
    received: np.ndarray  # int64[devices]: bytes that each device receives each time


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    type: str  # "f32[256,512]{1,0}", or a tuple of such
    opcode: str
    operands: str  # as written between the parentheses
    attributes: str  # what comes after them

    @functools.cached_property
    def operand_names(self) -> list[str]:
        return _OPERAND.findall(self.operands)

    def called(self, key: str) -> str | None:
        found = re.search(rf"\b{key}=%?([^\s,}}]+)", self.attributes)
        return found.group(1) if found else None


@dataclasses.dataclass(frozen=True)
class _Computation:
    instructions: dict[str, _Instruction]
    root: str


def collective_bytes(text: str, unknown_trips: int | None = None) -> dict[str, Traffic]:
    """The traffic of a compiled program, kind by kind; kinds that do not occur are left out.

    Args:
      text: optimized HLO, `compiled.as_text()`.
      unknown_trips: how often a loop is taken to run whose trip count depends on data; None makes that an error.

    Raises:
      ValueError: no HLO text, a loop of unknown trip count, or something that this module cannot read.
    """
    found: dict[str, list[Collective]] = {}
    for collective in collectives(text, unknown_trips):
        found.setdefault(collective.kind, []).append(collective)
    traffic = {}
    for kind, group in sorted(found.items()):
        received = _total(group)
        traffic[kind] = Traffic(sum(c.times for c in group), float(received.mean()), int(received.max()))
    return traffic


def received_bytes(text: str, unknown_trips: int | None = None) -> np.ndarray:
    """int64[devices]: bytes that each device receives in one run of the program; errors as `collective_bytes`."""
    found = list(collectives(text, unknown_trips))
    return _total(found) if found else np.zeros(_num_devices(text), np.int64)


def collectives(text: str, unknown_trips: int | None = None) -> Iterator[Collective]:
    """Every collective that a run of the program executes; arguments and errors as `collective_bytes`."""
    computations, entry = _parse(text)
    return _walk(computations, entry, 1, [], _num_devices(text), unknown_trips)


def _total(group: Sequence[Collective]) -> np.ndarray:
    return np.sum([c.times * c.received for c in group], axis=0)


def _num_devices(text: str) -> int:
    head = text.partition("\n")[0]
    sizes = [re.search(rf"\b{key}=(\d+)", head) for key in ("num_partitions", "replica_count")]
    return math.prod(int(size.group(1)) for size in sizes if size)


# Walking ------------------------------------------------------------------------------------------------------------


def _walk(computations: dict, name: str, times: int, args: list, n: int, unknown_trips: int | None) -> Iterator[Collective]:
    """The collectives under a computation that runs `times` times; `args` are its parameters' known scalars (`_evaluate`)."""
    computation, fused = computations[name], set()
    walk = functools.partial(_walk, computations, n=n, unknown_trips=unknown_trips)
    for op in computation.instructions.values():
        kind = op.opcode.removesuffix("-start")
        if kind in KINDS:
            yield _collective(computation, op, kind, _SCATTER in name, times, n)
        elif op.opcode == "while":
            body, condition = op.called("body"), op.called("condition")
            state = _evaluate(computations, name, op.operand_names[0], args)
            trips = _written_trips(op)
            trips = _trips(computations, body, condition, state) if trips is None else trips
            trips = unknown_trips if trips is None else trips
            if trips is None:
                raise ValueError(
                    f"the trip count of {op.name} depends on data; say how often it is to be counted (unknown_trips)"
                )
            yield from walk(body, times * trips, [_invariant(computations, body, state)])
        elif op.opcode == "conditional":
            found = [list(walk(branch, times, [])) for branch in _branches(op)]
            yield from max(found, key=lambda group: _total(group).max() if group else 0)
        elif kind in ("fusion", "call", "async"):
            values = [_evaluate(computations, name, operand, args) for operand in op.operand_names]
            called = op.called("calls") or op.called("to_apply") or ""
            for collective in walk(called, times, values):
                part = (collective.channel, collective.kind, collective.received.tobytes())
                if collective.channel is None or _SCATTER in called or part not in fused:
                    yield collective
                fused.add(part)


def _branches(op: _Instruction) -> list[str]:
    both = [op.called("true_computation"), op.called("false_computation")]
    many = op.attributes.partition("branch_computations={")[2].partition("}")[0]
    return [name for name in both if name] or _OPERAND.findall(many)


def _collective(computation: _Computation, op: _Instruction, kind: str, scattered: bool, times: int, n: int) -> Collective:
    size = sum(_bytes(computation.instructions[name].type) for name in op.operand_names)
    received = np.zeros(n, np.int64)
    written = re.search(r"\bchannel_id=(\d+)", op.attributes)
    channel = int(written.group(1)) if written else None
    if kind == "collective-permute":
        slices = re.search(r"\bslice_sizes=\{+([\d,]+)\}", op.attributes)
        if slices:  # in place: operands are the input, the output and where in them
            first = computation.instructions[op.operand_names[0]].type
            size = math.prod(int(x) for x in slices.group(1).split(",")) * _bits(first.partition("[")[0]) // 8
        pairs = op.attributes.split("source_target_pairs={")[1].partition("}}")[0]
        for source, target in re.findall(r"\{(\d+),(\d+)", pairs):
            received[int(target)] += size if source != target else 0
        return Collective(kind, op.name, channel, times, received)
    if kind == "all-reduce" and scattered:
        kind = "reduce-scatter"
    for members in _groups(op, n):
        k = len(members)
        received[members] += {
            "all-gather": (k - 1) * size,
            "reduce-scatter": size * (k - 1) // k,
            "all-reduce": 2 * size * (k - 1) // k,
            "all-to-all": size * (k - 1) // k,
            "ragged-all-to-all": _bytes(computation.instructions[op.operand_names[0]].type) * (k - 1) // k,
            "collective-broadcast": size,
        }[kind]
        if kind == "collective-broadcast":
            received[members[0]] -= size
    return Collective(kind, op.name, channel, times, received)


def _groups(op: _Instruction, n: int) -> list[list[int]]:
    """The devices that exchange with each other, from any of the forms in which HLO writes `replica_groups`."""
    written = op.attributes.partition("replica_groups=")[2]
    iota = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", written)
    if iota:
        shape, dims, order = ([int(x) for x in part.split(",")] if part else None for part in iota.groups())
        assert shape and dims
        return np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape).tolist()
    if written.startswith("mesh["):
        return _mesh_groups(written)
    if written.startswith("{{"):
        lists = re.findall(r"\{([\d,]+)\}", written.partition("}}")[0] + "}")
        return [[int(x) for x in members.split(",")] for members in lists]
    if written.startswith("{}") or not written:
        return [list(range(n))]
    raise ValueError(f"{op.name}: replica groups {written[:60]!r} are written in a form that is not known")


def _mesh_groups(written: str) -> list[list[int]]:
    """mesh['a'=4,'b'=2] {'a':(1)2}: groups along the axes in braces, or along a factor `:(what lies above it)size` of one.

    Which devices are together is not worked out, only how many: all devices are in one group each, so it is the same for all.
    """
    axes, _, chosen = written.removeprefix("mesh[").partition("}")[0].partition("{")
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", axes.partition("]")[0])}
    k = 1
    for name, factor in re.findall(r"'?([^',:]+)'?(?::\(\d+\)(\d+))?(?:,|$)", chosen):
        k *= int(factor) if factor else sizes[name]
    return np.arange(math.prod(sizes.values())).reshape(-1, k).tolist()


# Loops --------------------------------------------------------------------------------------------------------------


def _written_trips(op: _Instruction) -> int | None:
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', op.attributes)
    return int(found.group(1)) if found else None


def _trips(computations: dict, body: str, condition: str, state) -> int | None:
    """How often a loop runs that starts from `state` and whose counters grow by constants; None if that is not known."""
    if not isinstance(state, list):
        return None
    first, second = ([*state], _evaluate(computations, body, computations[body].root, [state]))
    third = _evaluate(computations, body, computations[body].root, [second]) if isinstance(second, list) else None
    if not isinstance(second, list) or not isinstance(third, list):
        return None
    linear = [
        isinstance(a, int) and isinstance(b, int) and isinstance(c, int) and c - b == b - a
        for a, b, c in zip(first, second, third, strict=True)
    ]

    def goes_on(trip: int):
        at = [a + trip * (b - a) if known else None for a, b, known in zip(first, second, linear, strict=True)]
        return _evaluate(computations, condition, computations[condition].root, [at])

    high = 1
    while goes_on(high - 1):
        high *= 2
        if high > 2**40:
            return None
    if goes_on(high - 1) is None:
        return None
    low = high // 2  # goes on at low - 1, stops at high - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if goes_on(middle - 1) else (low, middle)
    return high - 1


def _invariant(computations: dict, body: str, state):
    """The known scalars of a loop's state that its body hands on as they are."""
    root = computations[body].instructions[computations[body].root]
    if not isinstance(state, list) or root.opcode != "tuple":
        return None
    kept = []
    for i, name in enumerate(root.operand_names):
        op = computations[body].instructions[name]
        same = op.opcode == "get-tuple-element" and computations[body].instructions[op.operand_names[0]].opcode == "parameter"
        kept.append(state[i] if same and _index(op) == i else None)
    return kept


def _index(op: _Instruction) -> int:
    return int(op.attributes.partition("index=")[2].partition(",")[0])


_ARITHMETIC = {"add": lambda a, b: a + b, "subtract": lambda a, b: a - b, "multiply": lambda a, b: a * b,
               "and": lambda a, b: a & b, "or": lambda a, b: a | b}  # fmt: skip
_COMPARE = {"LT": lambda a, b: a < b, "LE": lambda a, b: a <= b, "GT": lambda a, b: a > b, "GE": lambda a, b: a >= b,
            "EQ": lambda a, b: a == b, "NE": lambda a, b: a != b}  # fmt: skip


def _evaluate(computations: dict, computation: str, name: str, args: list):
    """An integer or a bool, a list of values for a tuple, or None for what the known scalars do not determine."""
    op = computations[computation].instructions[name]
    if not re.match(r"\(|(?:[su]\d+|pred)\[\]", op.type):
        return None
    value = functools.partial(_evaluate, computations, computation, args=args)
    if op.opcode == "parameter":
        number = int(op.operands)
        return args[number] if number < len(args) else None
    if op.opcode == "constant":
        return int(op.operands) if re.fullmatch(r"-?\d+", op.operands) else {"true": True, "false": False}.get(op.operands)
    if op.opcode == "tuple":
        return [value(operand) for operand in op.operand_names]
    if op.opcode == "get-tuple-element":
        whole = value(op.operand_names[0])
        return whole[_index(op)] if isinstance(whole, list) else None
    if op.opcode in ("copy", "bitcast", "reshape", "opt-barrier"):
        return value(op.operand_names[0])
    if op.opcode in ("fusion", "call"):
        inner = op.called("calls") or op.called("to_apply")
        return _evaluate(computations, inner, computations[inner].root, [value(operand) for operand in op.operand_names])
    operands = [value(operand) for operand in op.operand_names] if op.opcode in (*_ARITHMETIC, "compare", "select") else [None]
    if any(x is None or isinstance(x, list) for x in operands):
        return None
    if op.opcode == "select":
        return operands[1] if operands[0] else operands[2]
    return (_COMPARE[op.called("direction")] if op.opcode == "compare" else _ARITHMETIC[op.opcode])(*operands)


# Text ---------------------------------------------------------------------------------------------------------------


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
    """Every computation of a module, and the name of the one where it starts."""
    computations: dict[str, _Computation] = {}
    entry, name, root, instructions = "", "", "", {}
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([^\s(]+) \(.*\) -> .*\{$", line) if not line.startswith(" ") else None
        if header:
            name, root, instructions = header.group(2), "", {}
            entry = name if header.group(1) else entry
        elif line.startswith("}") and name:
            computations[name] = _Computation(instructions, root)
            name = ""
        elif name and " = " in line:
            op = _instruction(line)
            instructions[op.name] = op
            root = op.name if line.lstrip().startswith("ROOT ") else root
    if not entry:
        raise ValueError("this is no HLO text: it has no ENTRY; pass compiled.as_text()")
    return computations, entry


def _instruction(line: str) -> _Instruction:
    left, _, right = line.strip().removeprefix("ROOT ").partition(" = ")
    end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    opcode, _, _ = right[end + 1 :].partition("(")
    start = end + 1 + len(opcode)
    stop = _closing(right, start)
    return _Instruction(left.removeprefix("%"), right[:end], opcode.strip(), right[start + 1 : stop], right[stop + 1 :])


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes."""
    depth = 0
    for found in re.finditer(r"[()]", text[start:]):
        depth += 1 if found.group() == "(" else -1
        if depth == 0:
            return start + found.start()
    raise ValueError(f"unbalanced parentheses in {text[:120]!r}")


def _bytes(written: str) -> int:
    """Of a shape, or of all shapes of a tuple."""
    total = 0
    for dtype, dims in _SHAPE.findall(written):
        total += math.prod(int(x.lstrip("<=")) for x in dims.split(",") if x) * _bits(dtype)
    return -(-total // 8)


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"(?:bf|f|s|u|c)(\d+)", dtype)
    if not found:
        raise ValueError(f"element type {dtype!r} is not known")
    return int(found.group(1))
