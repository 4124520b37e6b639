"""What a model is, read from its config.json and written back; and the facts of well-known ones."""

import dataclasses
from typing import Any

from jrl.errors import UserError


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context of pretraining."""

    kind: str  # "llama3" or "linear"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192  # tokens


@dataclasses.dataclass(frozen=True)
class Arch:
    """A dense decoder. Letters: V vocab_size, D hidden_size, F intermediate_size, L, H, J, K head_dim."""

    family: str  # "llama", "qwen2" or "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    max_position: int  # tokens

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_key_value_heads={self.num_kv_heads} does not divide num_attention_heads={self.num_heads}; "
                "every KV head serves the same number of query heads"
            )
        if self.family != "qwen2" and self.qkv_bias != self.o_bias:
            raise UserError(f"qkv_bias={self.qkv_bias} with o_bias={self.o_bias}: {self.family} has one attention_bias for both")

    def num_params(self) -> int:
        """Weights, tied ones once."""
        d, f, q, kv = self.hidden_size, self.intermediate_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = d * (q + 2 * kv) + q * d + 3 * d * f + 2 * d
        layer += (q + 2 * kv) * self.qkv_bias + d * self.o_bias + (2 * f + d) * self.mlp_bias + 2 * self.head_dim * self.qk_norm
        return self.num_layers * layer + self.vocab_size * d * (1 if self.tie_embeddings else 2) + d

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> "Arch":
        """From the contents of a config.json.

        Raises:
          UserError: a family or a feature that the decoder does not have, by name.
        """
        family = config.get("model_type")
        if family not in ("llama", "qwen2", "qwen3"):
            raise UserError(f"config.json: model_type={family!r} is not supported; llama, qwen2 and qwen3 are")
        if config.get("hidden_act", "silu") != "silu":
            raise UserError(f"config.json: hidden_act={config['hidden_act']!r} is not supported; silu is")
        if config.get("use_sliding_window"):
            raise UserError("config.json: use_sliding_window=true is not supported; only full attention is")
        needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        for key in needed:
            if not config.get(key):
                raise UserError(f"config.json: {key} is missing; a {family} model cannot be built without it")
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        theta = config.get("rope_theta") or rope.get("rope_theta") or 10000.0
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=hidden,
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or (128 if family == "qwen3" else hidden // heads),
            rope_theta=float(theta),
            rope_scaling=_rope_scaling(rope),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=True if family == "qwen2" else attention_bias,
            o_bias=attention_bias if family != "qwen2" else False,
            mlp_bias=bool(config.get("mlp_bias", False)) if family == "llama" else False,
            qk_norm=family == "qwen3",
            max_position=config.get("max_position_embeddings", 2048),
        )

    def to_hf_config(self) -> dict[str, Any]:
        """The contents of a config.json that `transformers` reads back as this model."""
        name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[self.family]
        config: dict[str, Any] = {
            "architectures": [f"{name}ForCausalLM"],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "tie_word_embeddings": self.tie_embeddings,
            "torch_dtype": "float32",
        }
        if self.family != "qwen2":
            config["attention_bias"] = self.o_bias
        if self.family == "llama":
            config["mlp_bias"] = self.mlp_bias
        s = self.rope_scaling
        if s is not None:
            config["rope_scaling"] = {"rope_type": s.kind, "factor": s.factor}
            if s.kind == "llama3":
                config["rope_scaling"] |= {
                    "low_freq_factor": s.low_freq_factor,
                    "high_freq_factor": s.high_freq_factor,
                    "original_max_position_embeddings": s.original_max_position,
                }
        return config


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3", float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )  # fmt: skip
    raise UserError(f"config.json: rope scaling {kind!r} is not supported; llama3 and linear are")


def _known(family, vocab, hidden, mlp, layers, heads, kv, head_dim, theta, eps, tied, longest, scaling=None) -> Arch:
    return Arch(
        family, vocab, hidden, mlp, layers, heads, kv, head_dim, theta, scaling, eps, tied, family == "qwen2", False,
        False, family == "qwen3", longest,
    )  # fmt: skip


def _known_models() -> dict[str, Arch]:
    def qwen2(v, d, f, n, h, j, tied):
        return _known("qwen2", v, d, f, n, h, j, 128 if d > 1000 else 64, 1e6, 1e-6, tied, 32768)

    def qwen3(d, f, n, h, j, tied):
        return _known("qwen3", 151936, d, f, n, h, j, 128, 1e6, 1e-6, tied, 40960)

    def llama3(d, f, n, h, j, k, tied, longest, scaling=None):
        return _known("llama", 128256, d, f, n, h, j, k, 5e5, 1e-5, tied, longest, scaling)

    def smol(d, f, n, h, j, theta=1e5, eps=1e-5):
        return _known("llama", 49152, d, f, n, h, j, 64, theta, eps, True, 8192)

    long8, long32 = RopeScaling("llama3", 8.0), RopeScaling("llama3", 32.0)
    table = {
        "Qwen/Qwen2.5-0.5B": qwen2(151936, 896, 4864, 24, 14, 2, True),
        "Qwen/Qwen2.5-1.5B": qwen2(151936, 1536, 8960, 28, 12, 2, True),
        "Qwen/Qwen2.5-3B": qwen2(151936, 2048, 11008, 36, 16, 2, True),
        "Qwen/Qwen2.5-7B": qwen2(152064, 3584, 18944, 28, 28, 4, False),
        "Qwen/Qwen2.5-14B": qwen2(152064, 5120, 13824, 48, 40, 8, False),
        "Qwen/Qwen2.5-32B": qwen2(152064, 5120, 27648, 64, 40, 8, False),
        "Qwen/Qwen2.5-72B": qwen2(152064, 8192, 29568, 80, 64, 8, False),
        "Qwen/Qwen3-0.6B": qwen3(1024, 3072, 28, 16, 8, True),
        "Qwen/Qwen3-1.7B": qwen3(2048, 6144, 28, 16, 8, True),
        "Qwen/Qwen3-4B": qwen3(2560, 9728, 36, 32, 8, True),
        "Qwen/Qwen3-8B": qwen3(4096, 12288, 36, 32, 8, False),
        "Qwen/Qwen3-14B": qwen3(5120, 17408, 40, 40, 8, False),
        "Qwen/Qwen3-32B": qwen3(5120, 25600, 64, 64, 8, False),
        "meta-llama/Meta-Llama-3-8B": llama3(4096, 14336, 32, 32, 8, 128, False, 8192),
        "meta-llama/Meta-Llama-3-70B": llama3(8192, 28672, 80, 64, 8, 128, False, 8192),
        "meta-llama/Llama-3.1-8B": llama3(4096, 14336, 32, 32, 8, 128, False, 131072, long8),
        "meta-llama/Llama-3.1-70B": llama3(8192, 28672, 80, 64, 8, 128, False, 131072, long8),
        "meta-llama/Llama-3.2-1B": llama3(2048, 8192, 16, 32, 8, 64, True, 131072, long32),
        "meta-llama/Llama-3.2-3B": llama3(3072, 8192, 28, 24, 8, 128, True, 131072, long32),
        "HuggingFaceTB/SmolLM2-135M": smol(576, 1536, 30, 9, 3),
        "HuggingFaceTB/SmolLM2-360M": smol(960, 2560, 32, 15, 5),
        "HuggingFaceTB/SmolLM2-1.7B": smol(2048, 8192, 24, 32, 32, 130000.0),
    }
    instruct = {name: arch for name, arch in table.items() if not name.startswith("Qwen/Qwen3")}
    return table | {f"{name}-Instruct": arch for name, arch in instruct.items()}


KNOWN: dict[str, Arch] = _known_models()
