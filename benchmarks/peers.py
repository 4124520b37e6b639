"""What others do with the work of rollout.py, measured by the same clock and counted alike."""

import time
from typing import Any, Protocol

import numpy as np


class Work(Protocol):
    """What rollout.py generates: `prompts` of equal length, `lengths` of their completions, `group` of each."""

    prompts: list[np.ndarray]
    lengths: np.ndarray
    group: int
    temperature: float


class TransformersGenerate:
    """`transformers` generate on torch, float32 on CPU and bfloat16 on GPU: each padded batch runs to its longest completion."""

    def __init__(self, model: str, batch: int):
        import torch
        from transformers import AutoModelForCausalLM

        self.torch, self.batch = torch, batch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(self.device).eval()

    def generate(self, work: Work, most: int = 1 << 30) -> float:
        """Seconds for every completion, each of its own length or `most`; batches of neighbours in the list of work."""
        torch = self.torch
        rows = [(p, min(int(n), most)) for p, n in zip(work.prompts, work.lengths, strict=True) for _ in range(work.group)]
        began = time.perf_counter()
        for i in range(0, len(rows), self.batch):
            batch = rows[i : i + self.batch]
            ids = torch.tensor(np.stack([p for p, _ in batch]), dtype=torch.long, device=self.device)
            new = max(n for _, n in batch)
            settings: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
            if work.temperature:
                settings |= {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": work.temperature}
            with torch.inference_mode():
                out = self.model.generate(
                    ids, attention_mask=torch.ones_like(ids), min_new_tokens=new, max_new_tokens=new, **settings
                )
            assert out.shape[1] == ids.shape[1] + new
        return time.perf_counter() - began
