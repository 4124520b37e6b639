"""What others do with the work of rollout.py, measured by the same clock and counted alike.

Each engine is made of a model's directory, the work, and how many sequences it may have under way at once. `generate` makes
every completion of exactly its own length, or `most`, and says in how many seconds.
"""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np


class Work(Protocol):
    """What rollout.py generates: `prompts` of equal length, `lengths` of their completions, `group` of each."""

    prompts: list[np.ndarray]
    lengths: np.ndarray
    group: int
    longest: int  # tokens of prompt and completion
    temperature: float


class Engine(Protocol):
    """What all of them are."""

    def generate(self, work: Work, most: int = 1 << 30) -> float:
        """Seconds for every completion of the work, each of its own length or `most`."""


def batches(work: Work, size: int, most: int) -> Iterator[tuple[list[np.ndarray], int]]:
    """Batches of neighbours in the list of work: prompts, and the tokens of the longest completion, to which all of them run."""
    rows = [(p, min(int(n), most)) for p, n in zip(work.prompts, work.lengths, strict=True) for _ in range(work.group)]
    for i in range(0, len(rows), size):
        batch = rows[i : i + size]
        yield [prompt for prompt, _ in batch], max(new for _, new in batch)


class TransformersGenerate:
    """`transformers` generate on torch, float32 on CPU and bfloat16 on GPU: each padded batch runs to its longest completion."""

    def __init__(self, model: str, work: Work, batch: int):
        import torch
        from transformers import AutoModelForCausalLM

        del work
        self.torch, self.batch = torch, batch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(self.device).eval()

    def generate(self, work: Work, most: int = 1 << 30) -> float:
        torch = self.torch
        settings: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
        if work.temperature:
            settings |= {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": work.temperature}
        began = time.perf_counter()
        for prompts, new in batches(work, self.batch, most):
            ids = torch.tensor(np.stack(prompts), dtype=torch.long, device=self.device)
            with torch.inference_mode():
                out = self.model.generate(
                    ids, attention_mask=torch.ones_like(ids), min_new_tokens=new, max_new_tokens=new, **settings
                )
            assert out.shape[1] == ids.shape[1] + new
        return time.perf_counter() - began


class TunixSampler:
    """Tunix's own sampler on one device, float32 on CPU and bfloat16 elsewhere: padded batches, as above. Llama models only.

    The models of 0.1.7 leave the config's rope_theta out; here they get it, so that they do the same arithmetic.
    """

    def __init__(self, model: str, work: Work, batch: int):
        import jax
        import jax.numpy as jnp
        from transformers import AutoTokenizer
        from tunix.generate import sampler
        from tunix.models.llama3 import model as llama
        from tunix.models.llama3 import params

        hf = json.loads((pathlib.Path(model) / "config.json").read_text())
        if hf["model_type"] != "llama":
            raise SystemExit(f"error: --engine tunix --model {model}: a {hf['model_type']} model; it is tried with Llama's only")
        theta = hf.get("rope_theta") or hf["rope_parameters"]["rope_theta"]
        heads = {"num_kv_heads": hf["num_key_value_heads"], "num_layers": hf["num_hidden_layers"]}
        heads["head_dim"] = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        config = llama.ModelConfig(
            **heads, num_heads=hf["num_attention_heads"], vocab_size=hf["vocab_size"], embed_dim=hf["hidden_size"],
            hidden_dim=hf["intermediate_size"], rope_theta=int(theta), norm_eps=hf["rms_norm_eps"],
            weight_tying=hf["tie_word_embeddings"],
        )  # fmt: skip
        llama.apply_rope.__defaults__ = (config.rope_theta,)
        self.batch, self.mesh = batch, jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        with self.mesh:
            loaded = params.create_model_from_safe_tensors(model, config, self.mesh, dtype=dtype)
            cache = sampler.CacheConfig(cache_size=work.longest, **heads)
            self.sampler = sampler.Sampler(loaded, AutoTokenizer.from_pretrained(model), cache)
        self.sampler.tokenize = lambda ids: ids  # the prompts are token ids already
        self.calls = 0

    def generate(self, work: Work, most: int = 1 << 30) -> float:
        sampling: dict[str, Any] = {"top_p": 1.0, "temperature": work.temperature} if work.temperature else {}
        began = time.perf_counter()
        for prompts, new in batches(work, self.batch, most):
            self.calls += 1
            with self.mesh:
                out = self.sampler(
                    prompts, max_generation_steps=new, max_prompt_length=len(prompts[0]), seed=self.calls,
                    eos_tokens=[-1],  # an id that no token has
                    **sampling,
                )  # fmt: skip
            assert all(len(tokens) == new for tokens in out.tokens)
        return time.perf_counter() - began


class VllmGenerate:
    """vLLM in this process, float32 on CPU and bfloat16 on GPU; its own scheduler, pages and shared prefixes."""

    def __init__(self, model: str, work: Work, batch: int):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the memory of this process is all of it
        import torch
        import vllm

        self.vllm = vllm
        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        self.llm = vllm.LLM(model=model, dtype=dtype, max_num_seqs=batch, max_model_len=work.longest)

    def generate(self, work: Work, most: int = 1 << 30) -> float:
        self.llm.reset_prefix_cache()  # as after an update of the weights
        lengths = [min(int(n), most) for n in work.lengths]
        prompts = [{"prompt_token_ids": p.tolist()} for p in work.prompts]
        settings = [
            self.vllm.SamplingParams(n=work.group, temperature=work.temperature, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in lengths
        ]
        began = time.perf_counter()
        outs = self.llm.generate(prompts, settings, use_tqdm=False)
        seconds = time.perf_counter() - began
        assert [[len(c.token_ids) for c in out.outputs] for out in outs] == [[n] * work.group for n in lengths]
        return seconds


# The engine, what is imported for it, and what pip installs for that.
ENGINES: dict[str, tuple[Callable[[str, Work, int], Engine], dict[str, str]]] = {
    "transformers": (TransformersGenerate, {"torch": "torch", "transformers": "transformers"}),
    "tunix": (TunixSampler, {"tunix": "google-tunix"}),
    "vllm": (VllmGenerate, {"vllm": "vllm"}),
}


def make(name: str, model: str, work: Work, batch: int) -> tuple[Engine, str]:
    """The engine, and its version. One line, if it is not there or cannot read the model, instead of a traceback."""
    engine, packages = ENGINES[name]
    for package, install in packages.items():
        if importlib.util.find_spec(package) is None:
            raise SystemExit(f"error: --engine {name}: the package {package} is not installed; pip install {install}")
    if not (pathlib.Path(model) / "config.json").is_file():
        raise SystemExit(f"error: --engine {name} --model {model}: it reads Hugging Face directories only; give one")
    return engine(model, work, batch), importlib.metadata.version(packages[list(packages)[-1]])
