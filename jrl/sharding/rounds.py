"""Blocks from devices that hold them to devices that want them, in as few rounds as possible.

In a round each device sends at most one block and receives at most one, so that a round is one `collective-permute`. Blocks
that a device holds already are copied, never sent. Where several devices hold a block, those who want it are spread over
them; the rounds are then an edge colouring of the bipartite graph of senders and receivers, with as many colours as the
busiest device has blocks (König, 1916).
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

Block = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Boxes:
    """Which blocks of a grid each device has: a box of the same size for all, somewhere."""

    start: np.ndarray  # int[devices, axes]
    size: tuple[int, ...]

    def blocks(self, device: int) -> list[Block]:
        return list(itertools.product(*(range(a, a + n) for a, n in zip(self.start[device], self.size, strict=True))))

    def number(self, device: int, block: Block) -> int:
        """Where a block is in a device's box, in row-major order."""
        return int(np.ravel_multi_index(np.subtract(block, self.start[device]), self.size))


@dataclasses.dataclass(frozen=True)
class Round:
    """Tables by device. Blocks are numbered within the sender's, or the receiver's, own box."""

    sender: np.ndarray  # i32[devices]: who sends to this device; itself where it copies, -1 where nothing arrives
    send: np.ndarray  # i32[devices]: the block that it sends, if any
    copy: np.ndarray  # i32[devices]: the block that it copies, if any
    place: np.ndarray  # i32[devices]: which of its wanted blocks arrives

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(sender, receiver) of every block that travels."""
        return [(int(s), d) for d, s in enumerate(self.sender) if s not in (-1, d)]


def schedule(held: Boxes, wanted: Boxes) -> list[Round]:
    """The rounds after which every device has its wanted box."""
    devices = len(held.start)
    deliveries, copies = _deliveries(held, wanted)
    colours = _colour(deliveries, devices)
    count = max(len(wanted.blocks(0)), max(colours, default=-1) + 1)
    sender = np.full((count, devices), -1, np.int32)
    send, copy, place = np.zeros((3, count, devices), np.int32)
    for (source, target, block), i in zip(deliveries, colours, strict=True):
        sender[i, target] = source
        send[i, source] = held.number(source, block)
        place[i, target] = wanted.number(target, block)
    for device, blocks in enumerate(copies):
        idle = np.flatnonzero(sender[:, device] < 0)
        for free, block in zip(idle, blocks, strict=False):
            sender[free, device] = device
            copy[free, device] = held.number(device, block)
            place[free, device] = wanted.number(device, block)
    return [Round(*tables) for tables in zip(sender, send, copy, place, strict=True)]


def _deliveries(held: Boxes, wanted: Boxes) -> tuple[list[tuple[int, int, Block]], list[list[Block]]]:
    """(sender, receiver, block) of what has to travel, and of each device the blocks that it keeps."""
    devices = len(held.start)
    holders: dict[Block, list[int]] = {}
    for device in range(devices):
        for block in held.blocks(device):
            holders.setdefault(block, []).append(device)
    load = [0] * devices
    deliveries, copies = [], [[] for _ in range(devices)]
    for device in range(devices):
        for block in wanted.blocks(device):
            if device in holders[block]:
                copies[device].append(block)
                continue
            source = min(holders[block], key=lambda holder: (load[holder], abs(holder - device)))  # noqa: B023
            load[source] += 1
            deliveries.append((source, device, block))
    return deliveries, copies


def _colour(deliveries: Sequence[tuple[int, int, Block]], devices: int) -> list[int]:
    """A round for each delivery, none of which shares its sender or its receiver with another of its round."""
    ends = [[source for source, _, _ in deliveries], [target for _, target, _ in deliveries]]
    busiest = max((int(np.bincount(end, minlength=devices).max()) for end in ends if end), default=0)
    taken = np.full((2, devices, busiest), -1)  # side, device, colour -> the delivery
    colours: list[int] = [-1] * len(deliveries)
    for i in range(len(deliveries)):
        source, target = ends[0][i], ends[1][i]
        free = (taken[0, source] < 0) & (taken[1, target] < 0)
        if free.any():
            colour = int(np.flatnonzero(free)[0])
        else:  # free the sender's colour at the receiver: swap two colours along the path that starts there
            colour, other = int(np.flatnonzero(taken[0, source] < 0)[0]), int(np.flatnonzero(taken[1, target] < 0)[0])
            path, side, at, wanted = [], 1, int(target), colour
            while (edge := int(taken[side, at, wanted])) >= 0:
                path.append(edge)
                side, at = 1 - side, ends[1 - side][edge]
                wanted = other if wanted == colour else colour
            for edge in path:
                for s in (0, 1):
                    taken[s, ends[s][edge], colours[edge]] = -1
            for edge in path:
                colours[edge] = other if colours[edge] == colour else colour
                for s in (0, 1):
                    taken[s, ends[s][edge], colours[edge]] = edge
        colours[i] = colour
        taken[0, source, colour] = taken[1, target, colour] = i
    return colours
