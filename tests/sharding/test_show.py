"""The picture of a run's meshes: its numbers against the arrays themselves."""

import re

import jax
import pytest

from jrl.models.decoder import init_params
from jrl.models.load import RANDOM
from jrl.sharding.layout import Layout
from jrl.sharding.show import main
from tests.runs import TINY

MESHES = ("--config.learner.mesh.fsdp=2", "--config.learner.mesh.context=2", "--config.learner.mesh.tensor=2",
          "--config.rollout.mesh.tensor=2")  # fmt: skip


def shown(capsys, *flags):
    status = main([f"--config={TINY}", *MESHES, *flags])
    return status, capsys.readouterr()


def test_devices_and_parts_are_those_of_the_arrays(capsys):
    status, (text, _) = shown(capsys, "--devices=8", "--hosts=2", "--config.model.compute_dtype=bfloat16")
    train, rollout = text.split("\n\n\n")
    assert status == 0 and "data=1 fsdp=2 context=2 tensor=2, 8 devices on 2 hosts" in train
    layout = Layout.train({"fsdp": 2, "context": 2, "tensor": 2})
    for fsdp, context in ((0, 0), (0, 1), (1, 0), (1, 1)):
        ids = [d.id for d in layout.mesh.devices[0, fsdp, context]]
        cells = "  ".join(f"{i} ({i // 4})" for i in ids)
        assert re.search(rf"\n +{fsdp} +{context} +{re.escape(cells)}\n", train)
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in train.splitlines() if line.startswith("  ") and line.strip()}
    params = init_params(RANDOM["tiny"], 0, layout)
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name, part = jax.tree_util.keystr(path, simple=True, separator="/"), x.addressable_shards[0].data
        sizes = [" ".join(map(str, array.shape)) for array in (x, part)]
        assert lines[name].startswith(f"float32 {sizes[0]} ") and f" {sizes[1]} " in lines[name], name
    assert lines["layers/gate/kernel"] == "float32 2 64 128 layers embed mlp - fsdp+context tensor 2 16 64 8 KiB"
    total = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(params))
    assert f"on one device {total / 1024:.0f} KiB" in train
    assert "replica=4 tensor=2" in rollout and re.search(r"layers/gate/kernel +bfloat16 .* 2 64 64 +16 KiB", rollout)


def test_a_pod_needs_no_devices(capsys, monkeypatch):
    monkeypatch.setattr(jax, "devices", None)  # asking for them would raise TypeError
    status, (text, _) = shown(capsys, "--devices=256", "--config.learner.mesh.data=-1")
    assert status == 0 and "data=32 fsdp=2 context=2 tensor=2, 256 devices on 1 host" in text
    assert "... 112 more rows" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--devices=12"], r"config.learner.mesh: train mesh: .* is 8 devices but there are 12"),
        (["--devices=8", "--hosts=3"], r"--hosts=3: 8 devices"),
        (["--devices=-1"], r"--devices=-1"),
        (["--device=8"], r"--device"),
    ],
)
def test_mistakes_are_one_line(capsys, flags, message):
    status, (out, err) = shown(capsys, *flags)
    assert status == 2 and not out and re.search(message, err) and err.count("\n") == 1
