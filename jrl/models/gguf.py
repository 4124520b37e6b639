"""GGUF files in: weights dequantized tensor by tensor, the architecture, and the tokenizer, without torch."""

import functools
import pathlib
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jrl.errors import UserError
from jrl.models.arch import Arch
from jrl.models.assemble import assemble

FAMILIES = ("llama", "qwen2", "qwen3")
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL
_QWEN_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@functools.lru_cache(maxsize=2)
def _reader(path: str) -> gguf.GGUFReader:
    if not pathlib.Path(path).is_file():
        raise UserError(f"model.path={path}: no such file; give the path of a .gguf file")
    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # the reader raises what numpy raises on a broken file
        raise UserError(f"model.path={path}: not a readable GGUF file ({error})") from None


def _value(path: str, key: str, default: Any = None) -> Any:
    field = _reader(path).fields.get(key)
    if field is None and default is None:
        raise UserError(f"model.path={path}: the GGUF file has no {key}; convert the model again")
    return default if field is None else field.contents()


def arch_from_gguf(path: str) -> Arch:
    """The architecture that the file's metadata describes.

    Raises:
      UserError: no such file, another family, or rope scaling, which this reader does not know.
    """
    family = _value(path, "general.architecture")
    if family not in FAMILIES:
        raise UserError(f"model.path={path}: architecture {family!r} is not supported; {', '.join(FAMILIES)} are")
    names = {t.name for t in _reader(path).tensors}
    if "rope_freqs.weight" in names or _value(path, f"{family}.rope.scaling.type", "none") != "none":
        raise UserError(f"model.path={path}: rope scaling in GGUF is not supported; use the model's Hugging Face directory")
    get = lambda key, default=None: _value(path, f"{family}.{key}", default)  # noqa: E731
    heads, hidden = get("attention.head_count"), get("embedding_length")
    return Arch(
        family=family,
        vocab_size=len(_value(path, "tokenizer.ggml.tokens")),
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length"),
        num_layers=get("block_count"),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=get("attention.key_length", hidden // heads),
        rope_theta=float(get("rope.freq_base", 10000.0)),
        rope_scaling=None,
        rms_norm_eps=float(f"{get('attention.layer_norm_rms_epsilon'):.6g}"),  # stored in float32: 9.99999974e-06
        tie_embeddings="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names,
        o_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_gate.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
        max_position=get("context_length"),
    )


def load_gguf(path: str, layout: Any = None):
    """The parameters, float32; `layout` as in `jrl.models.assemble`."""
    arch = arch_from_gguf(path)
    stored = {t.name: t for t in _reader(path).tensors}

    def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
        if name not in stored:
            raise UserError(f"model.path={path}: the tensor {name} is missing")
        tensor = stored[name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if arch.family == "llama" and name.split(".")[-2] in ("attn_q", "attn_k"):
            values = _unpermute(values, arch.num_heads if "attn_q" in name else arch.num_kv_heads)
        return values[index]

    return assemble(arch, "gguf", read, layout)


def _unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of q and k rows, which pairs neighbouring channels for its rotary embedding."""
    return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def tokenizer_from_gguf(path: str) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer in the file, with its special tokens and chat template.

    Raises:
      UserError: a tokenizer of another kind.
    """
    kind, pre = _value(path, "tokenizer.ggml.model"), _value(path, "tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in ("smollm", "qwen2"):
        raise UserError(
            f"model.path={path}: the GGUF tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported (gpt2 with smollm or "
            "qwen2 is); use the model's Hugging Face directory"
        )
    tokens = _value(path, "tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ", 1)) for m in _value(path, "tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, fuse_unk=False))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre == "smollm")
    if pre == "smollm":
        split: Any = pre_tokenizers.Digits(individual_digits=True)
    else:
        split = pre_tokenizers.Split(Regex(_QWEN_PATTERN), "isolated")
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    types = _value(path, "tokenizer.ggml.token_type")
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: _value(path, f"tokenizer.ggml.{key}_token_id", -1) for name, key in named.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **{n: tokens[i] for n, i in ids.items() if i >= 0}
    )
    tokenizer.chat_template = _value(path, "tokenizer.chat_template", "") or None
    return tokenizer
