"""Which tensor of a file is which parameter: one table per naming, read both ways.

A template with `{}` stands for one tensor per layer. Linear weights are [out, in] in these files and [in, out] here.
"""

import dataclasses
from typing import NamedTuple

from jrl.models.arch import Arch


class Tensor(NamedTuple):
    """One parameter's place in a file."""

    path: tuple[str, ...]  # in the parameter dict
    template: str  # name in the file
    transposed: bool


_LAYER = {
    "attn_norm/scale": ("input_layernorm.weight", "attn_norm.weight"),
    "q/kernel": ("self_attn.q_proj.weight", "attn_q.weight"),
    "k/kernel": ("self_attn.k_proj.weight", "attn_k.weight"),
    "v/kernel": ("self_attn.v_proj.weight", "attn_v.weight"),
    "o/kernel": ("self_attn.o_proj.weight", "attn_output.weight"),
    "q/bias": ("self_attn.q_proj.bias", "attn_q.bias"),
    "k/bias": ("self_attn.k_proj.bias", "attn_k.bias"),
    "v/bias": ("self_attn.v_proj.bias", "attn_v.bias"),
    "o/bias": ("self_attn.o_proj.bias", "attn_output.bias"),
    "q_norm/scale": ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "k_norm/scale": ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    "mlp_norm/scale": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "gate/kernel": ("mlp.gate_proj.weight", "ffn_gate.weight"),
    "up/kernel": ("mlp.up_proj.weight", "ffn_up.weight"),
    "down/kernel": ("mlp.down_proj.weight", "ffn_down.weight"),
    "gate/bias": ("mlp.gate_proj.bias", "ffn_gate.bias"),
    "up/bias": ("mlp.up_proj.bias", "ffn_up.bias"),
    "down/bias": ("mlp.down_proj.bias", "ffn_down.bias"),
}
_MODEL = {
    "embed/embedding": ("model.embed_tokens.weight", "token_embd.weight"),
    "final_norm/scale": ("model.norm.weight", "output_norm.weight"),
    "lm_head/kernel": ("lm_head.weight", "output.weight"),
}
_STYLES = {"hf": (0, "model.layers.{}."), "gguf": (1, "blk.{}.")}


def tensors(arch: Arch, style: str, scores: bool = False) -> list[Tensor]:
    """Every parameter of `arch`, in the order of the table; `style` is "hf" or "gguf".

    Args:
      scores: of a reward model, whose head puts out one number (`jrl.models.decoder.RewardModel`).
    """
    if scores:
        backbone = tensors(dataclasses.replace(arch, tie_embeddings=True), style)
        return [t._replace(path=("backbone", *t.path)) for t in backbone] + [Tensor(("value", "kernel"), "score.weight", True)]
    column, prefix = _STYLES[style]
    absent = {"lm_head/kernel"} if arch.tie_embeddings else set()
    absent |= set() if arch.qkv_bias else {"q/bias", "k/bias", "v/bias"}
    absent |= set() if arch.o_bias else {"o/bias"}
    absent |= set() if arch.mlp_bias else {"gate/bias", "up/bias", "down/bias"}
    absent |= set() if arch.qk_norm else {"q_norm/scale", "k_norm/scale"}
    table = [(f"layers/{path}", prefix + names[column]) for path, names in _LAYER.items() if path not in absent]
    table += [(path, names[column]) for path, names in _MODEL.items() if path not in absent]
    return [Tensor(tuple(path.split("/")), name, path.endswith("/kernel")) for path, name in table]
