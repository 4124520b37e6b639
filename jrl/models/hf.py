"""Hugging Face directories, read by shard and written so that `transformers` and vLLM open them."""

import json
import pathlib
from typing import Any

import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from jrl.errors import UserError
from jrl.models.arch import Arch
from jrl.models.assemble import assemble, at
from jrl.models.decoder import Decoder, Params, RewardModel, abstract_params
from jrl.models.names import tensors
from jrl.sharding.hosts import fetch, is_chief

SHARD_BYTES = 2 << 30
OF_STEPS = {"score_of": "steps"}  # in config.json, where each step of an answer has a score, not the whole


def read_config(directory: pathlib.Path) -> dict[str, Any]:
    """The contents of config.json."""
    file = pathlib.Path(directory) / "config.json"
    try:
        return json.loads(file.read_text())
    except OSError:
        raise UserError(f"model.path={directory}: holds no config.json; give a Hugging Face model directory") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{file}: line {error.lineno}: not JSON ({error.msg})") from None


def _files(directory: pathlib.Path) -> dict[str, pathlib.Path]:
    """Tensor name -> file that holds it."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = directory / "model.safetensors"
    if not single.is_file():
        raise UserError(f"model.path={directory}: holds no model.safetensors; convert the weights to safetensors")
    with safe_open(single, "numpy") as f:
        return dict.fromkeys(f.keys(), single)


def load_hf(directory: str | pathlib.Path, arch: Arch, layout: Any = None, scores: bool = False) -> Params:
    """The parameters, float32; of each file only the bytes that this process's devices hold are read.

    Args:
      scores: of a reward model, whose config.json says so (`scores_of`).

    Raises:
      UserError: a tensor that is missing, of another shape, or that the architecture has no place for.
    """
    directory = pathlib.Path(directory)
    files = _files(directory)
    _check_names(directory, arch, files, scores)
    # By way of numpy, since JAX has no CPU device where another platform alone is asked for. It knows bfloat16 once ml_dtypes
    # is loaded, which jax sees to.
    handles = {file: safe_open(file, "numpy") for file in set(files.values())}

    def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
        return np.asarray(handles[files[name]].get_slice(name)[index], np.float32)

    _check_shapes(directory, arch, lambda name: handles[files[name]].get_slice(name).get_shape(), scores)
    return assemble(arch, "hf", read, layout, scores)


def scores_of(config: dict[str, Any]) -> str:
    """What has a score by the model of a config.json: "answers" or "steps"; "" unless it is a classifier with one label.

    Raises:
      UserError: a classifier with several labels.
    """
    if not any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or ()):
        return ""
    labels = config.get("num_labels") or len(config.get("id2label") or ("LABEL_0", "LABEL_1"))
    if labels != 1:
        raise UserError(f"config.json: a classifier of {labels} labels has no single score; a reward model has num_labels=1")
    return "steps" if OF_STEPS.items() <= config.items() else "answers"


def _expected(arch: Arch, scores: bool) -> dict[str, list[int]]:
    shapes, out = abstract_params(arch, RewardModel if scores else Decoder), {}
    for path, template, transposed in tensors(arch, "hf", scores):
        shape = list(at(shapes, path).shape)
        inner = shape[1:] if "{}" in template else shape
        for layer in range(arch.num_layers) if "{}" in template else [0]:
            out[template.format(layer)] = inner[::-1] if transposed else inner
    return out


def _check_names(directory: pathlib.Path, arch: Arch, files: dict[str, pathlib.Path], scores: bool) -> None:
    expected = _expected(arch, scores)
    missing = [name for name in expected if name not in files]
    # Old exports keep the rotary table, and tied ones a second copy of the embedding.
    spare = ("rotary_emb.inv_freq",) + (("lm_head.weight",) if arch.tie_embeddings and not scores else ())
    extra = [name for name in files if name not in expected and not name.endswith(spare)]
    if missing or extra:
        what, name = ("has no tensor", missing[0]) if missing else ("has a tensor without a place in the model,", extra[0])
        raise UserError(f"model.path={directory}: {what} {name}; config.json and the weights do not belong together")


def _check_shapes(directory: pathlib.Path, arch: Arch, shape_of, scores: bool) -> None:
    for name, shape in _expected(arch, scores).items():
        found = list(shape_of(name))
        if found != shape:
            raise UserError(f"model.path={directory}: {name} has shape {found}, config.json says {shape}")


def save_hf(
    directory: str | pathlib.Path, arch: Arch, params: Params, tokenizer: Any = None, eos_ids: tuple[int, ...] = (),
    of_steps: bool = False,
) -> None:  # fmt: skip
    """Writes config, weights in files of at most 2 GiB, generation config and tokenizer; of several processes the first writes.

    Args:
      of_steps: the parameters are of a `RewardModel` that scores steps; `scores_of` reads it back.

    Parameters of a `RewardModel` become a sequence classifier with one label. It scores batches of several rows only if the
    tokenizer pads with a token that ends no sequence: `transformers` looks for the last one that is no padding.

    Weights are fetched from the devices one parameter at a time and written as float32, bit for bit.
    """
    if not is_chief():
        for path, _, _ in tensors(arch, "hf", "value" in params):
            fetch(at(params, path))  # every process has to give its parts
        return
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("model*.safetensors*"):
        old.unlink()
    config, scores = arch.to_hf_config(), "value" in params
    if scores:
        name = config["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
        pad = getattr(tokenizer, "pad_token_id", None)
        pad = None if pad in eos_ids else pad
        config |= {"architectures": [name], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "pad_token_id": pad}
        config |= OF_STEPS if of_steps else {}
    if eos_ids:
        ids = list(eos_ids) if len(eos_ids) > 1 else eos_ids[0]
        config["eos_token_id"] = ids
        if not scores:
            (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}, indent=2) + "\n")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shards = _write_shards(directory, arch, params)
    if len(shards) == 1:
        (directory / shards[0][0]).rename(directory / "model.safetensors")
    else:
        names = {name: f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i, (_, ns) in enumerate(shards) for name in ns}
        for i, (file, _) in enumerate(shards):
            (directory / file).rename(directory / f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors")
        total = sum(x.nbytes for x in jax.tree.leaves(params))
        index = {"metadata": {"total_size": total}, "weight_map": names}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def _write_shards(directory: pathlib.Path, arch: Arch, params: Params) -> list[tuple[str, list[str]]]:
    shards: list[tuple[str, list[str]]] = []
    pending: dict[str, np.ndarray] = {}

    def flush() -> None:
        if pending:
            file = f"model.part{len(shards)}.safetensors"
            save_file(pending, directory / file, metadata={"format": "pt"})
            shards.append((file, list(pending)))
            pending.clear()

    for path, template, transposed in tensors(arch, "hf", "value" in params):
        values = np.asarray(fetch(at(params, path)))
        for layer, value in enumerate(values) if "{}" in template else [(0, values)]:
            value = np.ascontiguousarray(value.T if transposed else value)
            if sum(x.nbytes for x in pending.values()) + value.nbytes > SHARD_BYTES:
                flush()
            pending[template.format(layer)] = value
    flush()
    return shards
