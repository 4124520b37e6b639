"""Checkpoints: everything that a resumed run needs, in one atomic step, written in the background by orbax.

A checkpoint is a directory named by its step. It appears under that name only when it is complete, and it holds a
manifest with the shape, dtype and digest (`jrl.sharding.digest`) of every array, so that a restored array is the array
that was saved. The size and checksum of each of its files stand in it too, and are looked at before anything is
restored: orbax reads arrays concurrently, and a read that fails half-way leaves the others calling into an event loop
that is closed, which can end the process. Nothing here ever deletes a checkpoint that it cannot read: what stands in the
way is renamed.

Of several processes, which share the directory, each writes its own parts of the arrays; what one of them cannot read, none
of them restores. What is left out: one directory has one run that writes to it.
"""

import json
import logging
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import preservation_policy

from jrl.errors import UserError
from jrl.sharding.digest import digest
from jrl.sharding.hosts import gather, is_chief, together

log = logging.getLogger("jrl")

T = TypeVar("T")

ASIDE = "set_aside_"  # prefix of the new name of a checkpoint that stands in the way
FILES = "files.json"  # in a checkpoint: {relative path: [bytes, crc32]} of its other files
BLOCK = 1 << 24  # bytes read at a time


class _NotWhole(Exception):
    """A checkpoint cannot be read, in one line why."""


class Checkpointer:
    """Saves and restores a tree of arrays together with a small dict.

    Args:
      directory: created when absent; a partial checkpoint that a killed run left in it is removed.
      keep: how many of the latest checkpoints stay.
      best: the one with the highest metric (of equals, the latest) stays too.
    """

    def __init__(self, directory: Any, keep: int, best: bool = False):
        if keep < 1:
            raise UserError(f"checkpoint.keep={keep} would keep nothing; give at least 1")
        self.directory = epath.Path(directory).expanduser().resolve()
        policies: list[Any] = [preservation_policy.LatestN(keep)]
        if best:
            policies.append(preservation_policy.BestN(get_metric_fn=_metric, n=1, keep_checkpoints_without_metrics=False))
        options = ocp.CheckpointManagerOptions(
            best_fn=_metric if best else None,  # without it orbax would not store the metric
            preservation_policy=preservation_policy.AnyPreservationPolicy(policies),
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._list_files),
        )
        names = ("state", "extra")
        self._manager = ocp.CheckpointManager(self.directory, options=options, item_names=names)
        self._saving = -1  # the step that is being written
        self._written: set[int] = set()
        self._unreadable: set[int] = set()

    def steps(self) -> tuple[int, ...]:
        """The steps on disk, or being written, in ascending order."""
        return tuple(sorted(self._manager.all_steps()))

    def save(self, step: int, state: Any, extra: Mapping[str, Any], metric: float | None = None) -> bool:
        """Starts a checkpoint; when this returns the values are safe, and the caller may donate the arrays.

        The writing goes on in the background and ends before the next save starts, or in `wait`. A step that this
        object has saved before is not saved again. Checkpoints of the same or a later step that it has not written
        belong to another course of the run; they are renamed.

        Args:
          step: the number of finished steps.
          state: a tree of `jax.Array`s.
          extra: what json can hold (its keys are strings); copied at once.
          metric: higher is better; None or not a finite number never counts as the best.

        Returns:
          whether it is saved now, and was not before.

        Raises:
          TypeError: `extra` does not fit into json. Also whatever the previous save met in the background.
        """
        if step in self._written:
            return False
        arrays = _by_name(state)
        digests = digest(arrays)
        manifest = {name: [list(x.shape), x.dtype.name, digests[name]] for name, x in arrays.items()}
        content = json.loads(json.dumps({"extra": dict(extra), "manifest": manifest}))
        self.wait()
        self._set_aside({old for old in self.steps() if old >= step and old not in self._written} | self._unreadable)
        value = float("-inf") if metric is None or not math.isfinite(metric) else float(metric)
        self._saving = step
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(arrays),
                extra=ocp.args.JsonSave({**content, "checksum": _checksum(content)}),
            ),
            metrics={"metric": value},
            force=True,
        )
        self._written.add(step)
        return True

    def wait(self) -> None:
        """Returns when nothing is being written; raises what the writing met."""
        self._manager.wait_until_finished()

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[int, Any, dict[str, Any]] | None:
        """The latest checkpoint that is whole, or the one of a given step.

        Args:
          abstract_state: a tree of `jax.ShapeDtypeStruct`s with shardings, or of arrays to take these from; the mesh
            may differ from the one that the checkpoint was written on.
          step: None for the latest. Each checkpoint that cannot be read costs one logged line, and the next older is
            tried.

        Returns:
          (step, state, extra), or None where there is no whole checkpoint.

        Raises:
          UserError: the checkpoint is of another model or optimizer; or the step that was asked for is absent or not
            whole.
        """
        self.wait()
        if step is not None and step not in self.steps():
            raise UserError(f"checkpoint: {self.directory} holds no step {step}; it holds {list(self.steps())}")
        for candidate in (step,) if step is not None else reversed(self.steps()):
            found = self._try_to_read(candidate, abstract_state)
            if not isinstance(found, str):
                self._written.add(candidate)  # what is on disk is what this run would write
                return candidate, *found
            if step is not None:
                raise UserError(f"checkpoint: step {step} in {self.directory} is not whole ({found})")
            log.warning("checkpoint of step %d skipped, it is not whole (%s)", candidate, found)
            self._unreadable.add(candidate)
        return None

    def close(self) -> None:
        """Waits for what is being written, then ends the background threads."""
        self._manager.close()

    def _try_to_read(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, Any]] | str:
        """The state and the extra data, or in one line why they cannot be read."""
        wanted = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in _by_name(abstract_state).items()
        }
        state = ocp.args.StandardRestore(wanted)
        try:
            _agreed(lambda: self._check_files(step) if is_chief() else None)
            content = _agreed(lambda: self._content(step))
            self._check_same_model(step, content["manifest"], wanted)
            arrays = _agreed(lambda: self._manager.restore(step, args=ocp.args.Composite(state=state))["state"])
            _agreed(lambda: _check_digests(arrays, content["manifest"]))
        except _NotWhole as why:
            return str(why)
        structure = jax.tree_util.tree_structure(abstract_state)
        return jax.tree_util.tree_unflatten(structure, [arrays[name] for name in wanted]), content["extra"]

    def _content(self, step: int) -> dict[str, Any]:
        """What a checkpoint holds beside the arrays."""
        restored = self._manager.restore(step, args=ocp.args.Composite(extra=ocp.args.JsonRestore()))["extra"]
        content = {"extra": restored["extra"], "manifest": restored["manifest"]}
        if _checksum(content) != restored["checksum"]:
            raise ValueError("the checksum of the extra data differs")
        return content

    def _list_files(self) -> None:
        """Called by orbax, in the background, when all is written, before or after the checkpoint gets its own name."""
        final = self.directory / str(self._saving)
        partial = final.with_name(final.name + ocp.utils.TMP_DIR_SUFFIX)
        path = partial if partial.exists() else final
        (path / FILES).write_text(json.dumps(_file_sums(path)))

    def _check_files(self, step: int) -> None:
        path = self.directory / str(step)
        if not (path / FILES).exists():  # where names are not given at the end, the process may have ended in between
            return
        found = _file_sums(path)
        for name, listed in json.loads((path / FILES).read_text()).items():
            if name not in found:
                raise ValueError(f"{name} is missing")
            if found[name] != listed:
                raise ValueError(f"{name} has changed: (bytes, crc32) were {listed}, are {found[name]}")

    def _check_same_model(self, step: int, manifest: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        have = {name: (tuple(shape), dtype) for name, (shape, dtype, _) in manifest.items()}
        want = {name: (tuple(x.shape), x.dtype.name) for name, x in wanted.items()}
        for name in sorted(have.keys() | want.keys()):
            if have.get(name) != want.get(name):
                raise UserError(
                    f"checkpoint: step {step} in {self.directory} has {name} as {have.get(name, 'nothing')}, this run"
                    f" {want.get(name, 'nothing')}; resume with the same model and optimizer, or choose another run_dir"
                )

    def _set_aside(self, steps: set[int]) -> None:
        for step in sorted(steps) if is_chief() else ():
            path = self.directory / str(step)
            if not path.exists():
                continue
            taken = {p.name for p in self.directory.iterdir()}
            name = next(n for i in range(len(taken) + 1) if (n := f"{ASIDE}{step}" + f"_{i}" * bool(i)) not in taken)
            log.warning("checkpoint of step %d stands in the way and is renamed to %s", step, name)
            path.rename(self.directory / name)
        if steps:
            together("the renaming of checkpoints")
            self._manager.reload()
            self._unreadable.clear()


def _agreed(work: Callable[[], T]) -> T:
    """What `work` returns, if it succeeds in every process; otherwise all raise what the first of them met."""
    result: Any = None
    flaw = None
    try:
        result = work()
    except Exception as error:  # damage shows itself as any kind of exception, at any depth
        flaw = f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:300]}"
    for told in filter(None, gather(flaw, "reading a checkpoint")):
        raise _NotWhole(told)
    return result


def _check_digests(arrays: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    for name, found in digest(arrays).items():
        if found != manifest[name][2]:
            raise ValueError(f"the digest of {name} differs")


def _by_name(tree: Any) -> dict[str, Any]:
    """`params.layers.q.kernel` -> leaf: the names orbax stores, free of the containers of the tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _file_sums(path: epath.Path) -> dict[str, list[int]]:
    """{relative path: [bytes, crc32]} of the files in the directories under `path`; those beside them are orbax's notes."""
    sums = {}
    for file in (file for item in path.iterdir() if item.is_dir() for file in _files_under(item)):
        size = crc = 0
        with file.open("rb") as stream:
            while block := stream.read(BLOCK):
                size, crc = size + len(block), zlib.crc32(block, crc)
        sums[str(file.relative_to(path))] = [size, crc]
    return sums


def _files_under(path: epath.Path) -> Iterator[epath.Path]:
    for child in path.iterdir():
        if child.is_dir():
            yield from _files_under(child)
        else:
            yield child


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _metric(metrics: Mapping[str, float]) -> float:
    return metrics["metric"]
