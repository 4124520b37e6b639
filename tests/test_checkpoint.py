import logging
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrl import checkpoint
from jrl.checkpoint import Checkpointer
from jrl.errors import UserError
from jrl.sharding.layout import Layout

AXES = {"w": ("vocab", "embed"), "norm": ("norm",)}


def values(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    return {"w": rng.standard_normal((16, 8), np.float32), "norm": rng.standard_normal((8,), np.float32)}


def place(layout: Layout, seed: int) -> dict:
    return jax.device_put(values(seed), layout.tree(AXES, values(seed)))


@pytest.fixture(scope="module")
def layout():
    return Layout.train({"fsdp": 4, "tensor": 2})


@pytest.fixture
def opened(tmp_path):
    """Opens checkpointers on one directory, and closes them."""
    made = []

    def open_one(keep: int = 3, best: bool = False) -> Checkpointer:
        made.append(Checkpointer(tmp_path / "ckpt", keep, best))
        return made[-1]

    yield open_one
    for one in made:
        one.close()


def check(restored, step: int, seed: int) -> None:
    assert restored is not None
    assert restored[0] == step
    jax.tree.map(np.testing.assert_array_equal, restored[1], values(seed))


def test_round_trip_with_optimizer_and_extra(opened, layout):
    params = place(layout, 1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1.0, 0.5, 10)))
    optimizer_state = jax.jit(optimizer.init)(params)
    _, optimizer_state = jax.jit(optimizer.update)(params, optimizer_state, params)
    state = {"params": params, "optimizer": optimizer_state, "step": jnp.int32(7), "key": jax.random.key(5)}
    extra = {"data": {"epoch": 2, "order": [3, 1, 2]}, "share": 0.1, "note": "ü", "nothing": None}
    writer = opened()
    writer.save(7, state, extra)
    writer.wait()
    step, restored, restored_extra = opened().restore(state)
    assert (step, restored_extra) == (7, extra)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert jax.random.key_data(restored.pop("key")).tolist() == jax.random.key_data(state.pop("key")).tolist()
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert jax.tree.map(lambda x: x.sharding, restored["params"]) == jax.tree.map(lambda x: x.sharding, params)


def test_nothing_to_restore(opened, layout):
    assert opened().restore(place(layout, 0)) is None


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 4}, {"data": 8}, None])
def test_restores_on_another_mesh(opened, layout, sizes):
    writer = opened()
    writer.save(1, place(layout, 1), {})
    other = Layout.train(sizes) if sizes else Layout.train({}, jax.devices()[:1])
    shardings = other.tree(AXES, values(1))
    abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), values(1), shardings)
    restored = writer.restore(abstract)
    check(restored, 1, 1)
    assert jax.tree.map(lambda x: x.sharding, restored[1]) == shardings


def test_arrays_may_be_donated_as_soon_as_save_returns(opened):
    spoil = jax.jit(lambda s: jax.tree.map(lambda x: jnp.full_like(x, -1.0), s), donate_argnums=0)
    for devices, layout in enumerate([Layout.train({}, jax.devices()[:1]), Layout.train({"fsdp": 4, "tensor": 2})]):
        state = place(layout, devices)
        writer = opened()
        writer.save(devices, state, {})
        jax.block_until_ready(spoil(state))
        del state
        check(writer.restore(place(layout, 9)), devices, devices)


def test_keeps_the_latest_and_the_best(opened, layout):
    writer = opened(keep=2, best=True)
    for step, metric in enumerate([0.1, 0.9, None, float("nan"), 0.9, 0.2, 0.3], start=1):
        writer.save(step, place(layout, step), {"seed": step}, metric)
        if step == 4:
            writer.close()
            writer = opened(keep=2, best=True)  # a resumed run still knows the metrics
            assert writer.steps() == (2, 3, 4)
    writer.wait()
    assert writer.steps() == (5, 6, 7)  # of the two 0.9 the later
    check(writer.restore(place(layout, 0)), 7, 7)
    check(writer.restore(place(layout, 0), step=5), 5, 5)
    with pytest.raises(UserError, match=r"holds no step 2; it holds \[5, 6, 7\]"):
        writer.restore(place(layout, 0), step=2)


def test_keeps_only_the_latest_without_best(opened, layout):
    writer = opened(keep=1)
    for step, metric in [(1, 0.9), (2, 0.1)]:
        writer.save(step, place(layout, step), {}, metric)
    writer.wait()
    assert writer.steps() == (2,)
    with pytest.raises(UserError, match="keep=0"):
        opened(keep=0)


def data_file(path: pathlib.Path) -> pathlib.Path:
    return max((path / "state" / "d").iterdir(), key=lambda p: p.stat().st_size)


def flip_a_byte(path: pathlib.Path) -> None:
    data = bytearray(data_file(path).read_bytes())
    data[len(data) // 2] ^= 0x10
    data_file(path).write_bytes(data)


def truncate(path: pathlib.Path) -> None:
    data_file(path).write_bytes(b"")


def lose_a_file(path: pathlib.Path) -> None:
    data_file(path).unlink()


def swap_in_older_arrays(path: pathlib.Path) -> None:
    """Readable, of the right shapes, and wrong: without the list of files, only the digest can tell."""
    (path / checkpoint.FILES).unlink()
    shutil.rmtree(path / "state")
    shutil.copytree(path.parent / "1" / "state", path / "state")


def edit_extra(path: pathlib.Path) -> None:
    """Without the list of files, only the checksum of the content can tell."""
    (path / checkpoint.FILES).unlink()
    file = next(p for p in (path / "extra").iterdir() if "cursor" in p.read_text())
    file.write_text(file.read_text().replace("41", "42"))


def lose_extra(path: pathlib.Path) -> None:
    shutil.rmtree(path / "extra")


@pytest.mark.parametrize(
    "damage",
    [flip_a_byte, truncate, lose_a_file, swap_in_older_arrays, edit_extra, lose_extra],
    ids=lambda f: f.__name__,
)
def test_damage_is_noticed_and_the_next_older_used(opened, layout, caplog, damage):
    writer = opened()
    for step in (1, 2):
        writer.save(step, place(layout, step), {"cursor": 41})
    writer.close()
    reader = opened()
    check(reader.restore(place(layout, 0)), 2, 2)  # control: whole until damaged
    damage(pathlib.Path(reader.directory) / "2")
    with caplog.at_level(logging.WARNING, logger="jrl"):
        check(reader.restore(place(layout, 0)), 1, 1)
    lines = [r.getMessage() for r in caplog.records if r.name == "jrl"]
    assert len(lines) == 1 and lines[0].startswith("checkpoint of step 2 skipped") and "\n" not in lines[0]
    with pytest.raises(UserError, match="step 2 in .* is not whole"):
        reader.restore(place(layout, 0), step=2)


def test_the_list_of_files_is_in_the_checkpoint_when_it_gets_its_name(opened, layout, monkeypatch):
    """So that no moment of a kill leaves a checkpoint without it."""
    seen = []
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda a, b: (seen.append((a, os.listdir(a))), rename(a, b)))
    writer = opened()
    writer.save(1, place(layout, 1), {})
    writer.close()
    [names] = [names for source, names in seen if pathlib.Path(source).name.startswith("1.orbax-checkpoint-tmp")]
    assert checkpoint.FILES in names
    (pathlib.Path(writer.directory) / "1" / checkpoint.FILES).unlink()
    check(opened().restore(place(layout, 0)), 1, 1)  # what was written elsewhere, without one, can be read


def test_a_resumed_run_renames_what_stands_in_the_way(opened, layout):
    writer = opened(keep=2)
    for step in (1, 2):
        writer.save(step, place(layout, step), {})
    writer.close()
    flip_a_byte(pathlib.Path(writer.directory) / "2")
    resumed = opened(keep=2)
    assert resumed.restore(place(layout, 0))[0] == 1
    resumed.save(2, place(layout, 22), {})
    resumed.save(2, place(layout, 23), {})  # the same step once more, as a signal right after a save causes
    check(resumed.restore(place(layout, 0)), 2, 22)
    assert resumed.steps() == (1, 2)
    resumed.save(3, place(layout, 3), {})
    resumed.wait()
    assert sorted(p.name for p in resumed.directory.iterdir()) == ["2", "3", f"{checkpoint.ASIDE}2"]


def test_another_model_is_an_error_and_not_a_fresh_start(opened, layout):
    writer = opened()
    writer.save(1, place(layout, 1), {})
    larger = {**place(layout, 1), "norm": jnp.zeros(9)}
    with pytest.raises(UserError, match=r"has norm as \(\(8,\), 'float32'\), this run \(\(9,\), 'float32'\)"):
        writer.restore(larger)
    with pytest.raises(UserError, match=r"has bias as nothing"):
        writer.restore({**place(layout, 1), "bias": jnp.zeros(9)})


def test_extra_must_fit_into_json(opened, layout):
    writer = opened()
    with pytest.raises(TypeError, match="json|JSON"):
        writer.save(1, place(layout, 1), {"x": object()})
    assert writer.steps() == ()


KILLED = """
import os, signal, sys
import jax, jax.numpy as jnp
from jrl.checkpoint import Checkpointer
c = Checkpointer(sys.argv[1], keep=3)
c.save(1, {"w": jnp.arange(4e6)}, {"a": 1})
c.wait()
c.save(2, {"w": jax.random.normal(jax.random.key(0), (4_000_000,))}, {"a": 2})
while len(os.listdir(sys.argv[1])) < 2:  # its directory is made in the background
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_inside_a_save_leaves_the_earlier_checkpoint(tmp_path):
    root = str(pathlib.Path(checkpoint.__file__).parents[1])
    env = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=env, timeout=60)
    assert done.returncode == -signal.SIGKILL
    names = {p.name for p in tmp_path.iterdir()}
    assert "1" in names and "2" not in names and len(names) == 2, names  # the second one was being written
    resumed = Checkpointer(tmp_path, keep=3)
    step, state, extra = resumed.restore({"w": jax.device_put(jnp.zeros(4_000_000), jax.devices()[0])})
    assert (step, extra) == (1, {"a": 1})
    np.testing.assert_array_equal(state["w"], np.arange(4e6, dtype=np.float32))
    resumed.save(2, {"w": jnp.ones(3)}, {})  # what the killed run left does not stand in the way
    resumed.close()
    assert {p.name for p in tmp_path.iterdir()} == {"1", "2"}
