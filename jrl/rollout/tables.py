"""The page tables of a decode call: what each slot has for itself, and what several have in common."""

from collections import defaultdict

import numpy as np

from jrl.rollout.paged_attention import Table
from jrl.rollout.scheduler import Replica, Sample
from jrl.rollout.sizes import Sizes
from jrl.shapes import power_of_two

Shared = tuple[list[int], list[int]]  # slots, and the pages that they begin with


class TableMaker:
    """Makes `Table`s whose arrays have few different shapes, so that few programs are compiled.

    Args:
      row_pages: the most pages of a row; None for one row a slot, however long.
    """

    def __init__(self, sizes: Sizes, row_pages: int | None):
        self._sizes, self._row_pages = sizes, row_pages
        self._rooms: set[tuple[int, int]] = set()  # (prefixes, members) of the tables made so far

    def forget(self) -> None:
        """Makes tables as a new maker would: the sizes of products may move last bits, and these must not tell the past."""
        self._rooms.clear()

    def make(self, replicas: list[Replica]) -> Table:
        """Arrays of NumPy for the samples now in the slots, whose pages have room for the tokens to come."""
        slots = len(replicas[0].slots)
        sets = [common_prefixes(replica) if self._sizes.shares else [] for replica in replicas]
        skip = np.zeros((len(replicas), slots), np.int32)
        for r, of_replica in enumerate(sets):
            for members, pages in of_replica:
                skip[r, members] = len(pages)
        own: list[list[list[int]]] = [[[] for _ in range(slots)] for _ in replicas]
        for r, replica in enumerate(replicas):
            for b, sample in replica.busy:
                own[r][b] = sample.pages[skip[r, b] :]
        return Table(*self._rows(own), skip, *self._shared(sets, slots))

    def _rows(self, pages: list[list[list[int]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`own`, `owner` and `start` of the pages of each replica's slots."""
        replicas, slots = len(pages), len(pages[0])
        longest = max(max(map(len, of_slots)) for of_slots in pages)
        width = self._sizes.row(longest)
        needed = np.array([[max(-(-len(p) // width), 1) for p in of_slots] for of_slots in pages])
        count = slots if longest <= width else self._sizes.rows(int(needed.sum(axis=1).max()))
        start = np.cumsum(needed, axis=1) - needed
        own = np.zeros((replicas, count * width), np.int32)
        owner = np.full((replicas, count), slots, np.int32)
        for r, of_slots in enumerate(pages):
            owner[r, : needed[r].sum()] = np.repeat(np.arange(slots), needed[r])
            for begin, of_slot in zip(start[r] * width, of_slots, strict=True):
                own[r, begin : begin + len(of_slot)] = of_slot
        return own.reshape(replicas, count, width), owner, start.astype(np.int32)

    def _shared(self, sets: list[list[Shared]], slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """`shared`, `prefix`, `members` and `place` of each replica's prefixes."""
        everyone = [one for of_replica in sets for one in of_replica]
        count, most = self._room(sets, slots) if everyone else (0, 1)
        longest = max((len(pages) for _, pages in everyone), default=1)
        width = min(power_of_two(longest), self._row_pages or power_of_two(longest))
        needed = max(sum(-(-len(pages) // width) for _, pages in of_replica) for of_replica in sets)
        rows = count if longest <= width else power_of_two(max(needed, count + 1))
        shared = np.zeros((len(sets), rows, width), np.int32)
        prefix = np.full((len(sets), rows), count, np.int32)
        members = np.zeros((len(sets), count, most), np.int32)
        place = np.full((len(sets), slots), count * most, np.int32)
        for r, of_replica in enumerate(sets):
            begin = 0
            for p, (slot_ids, pages) in enumerate(of_replica):
                end = begin + -(-len(pages) // width)
                shared[r, begin:end].reshape(-1)[: len(pages)] = pages
                prefix[r, begin:end], begin = p, end
                members[r, p, : len(slot_ids)] = slot_ids
                members[r, p, len(slot_ids) :] = slot_ids[0]
                place[r, slot_ids] = p * most + np.arange(len(slot_ids))
        return shared, prefix, members, place

    def _room(self, sets: list[list[Shared]], slots: int) -> tuple[int, int]:
        """For how many prefixes and members of each: an earlier room that fits and costs little more, or a new one.

        What is read together is computed for prefixes x members queries, filled or not. Two for each slot are cheap.
        """
        prefixes = power_of_two(max(map(len, sets)))
        members = power_of_two(max(len(slot_ids) for of_replica in sets for slot_ids, _ in of_replica))
        cheap = 2 * max(slots, prefixes * members)
        fitting = [(p, m) for p, m in self._rooms if p >= prefixes and m >= members and p * m <= cheap]
        room = min(fitting, key=lambda room: (room[0] * room[1], room), default=(prefixes, members))
        self._rooms.add(room)
        return room


def common_prefixes(replica: Replica) -> list[Shared]:
    """(slots, pages) of the samples of one request that begin with the same pages, where there are two or more."""
    groups: dict[int, list[tuple[int, Sample]]] = defaultdict(list)
    for slot, sample in replica.busy:
        groups[sample.group.ticket].append((slot, sample))
    sets = []
    for members in groups.values():
        # The page that is being written is nobody else's, whatever the others hold.
        rows = [sample.pages[: sample.cached // replica.index.page_size] for _, sample in members]
        same = next((i for i, column in enumerate(zip(*rows, strict=False)) if len(set(column)) > 1), min(map(len, rows)))
        if len(members) > 1 and same:
            sets.append(([slot for slot, _ in members], rows[0][:same]))
    return sets
