"""The other engines of the benchmark: what they are asked for, and what is said where they are missing."""

import importlib.util
import pathlib
import sys
import types

import numpy as np
import pytest

PATH = pathlib.Path(__file__).parent.parent / "benchmarks" / "peers.py"


@pytest.fixture(scope="module")
def peers():
    """The module, by its path: benchmarks are scripts, not a package."""
    spec = importlib.util.spec_from_file_location("peers", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Work:
    prompts = [np.arange(5), np.arange(5) + 1, np.arange(5) + 2]
    lengths = np.array([4, 9, 3])
    group, longest, temperature = 2, 14, 0.5


def test_batches_are_neighbours_and_run_to_their_longest(peers):
    found = [([int(p[0]) for p in prompts], new) for prompts, new in peers.batches(Work, 4, 1 << 30)]
    assert found == [([0, 0, 1, 1], 9), ([2, 2], 3)]
    assert [new for _, new in peers.batches(Work, 4, 2)] == [2, 2]


class FakeVllm(types.ModuleType):
    """As much of vLLM as is used, which answers with `off` tokens more than it was asked for."""

    def __init__(self, off):
        super().__init__("vllm")
        self.off, self.asked, self.resets = off, [], 0
        self.SamplingParams = lambda **settings: types.SimpleNamespace(**settings)
        self.LLM = self.make

    def make(self, **settings):
        self.settings = settings
        return self

    def reset_prefix_cache(self):
        self.resets += 1

    def generate(self, prompts, settings, use_tqdm):
        self.asked += zip((p["prompt_token_ids"] for p in prompts), settings, strict=True)
        sample = lambda s: types.SimpleNamespace(token_ids=[0] * (s.max_tokens + self.off))  # noqa: E731
        return [types.SimpleNamespace(outputs=[sample(s) for _ in range(s.n)]) for s in settings]


def vllm_of(peers, monkeypatch, off=0):
    fake = FakeVllm(off)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # and back again after the test
    return fake, peers.VllmGenerate("model", Work, 4)


def test_vllm_gets_the_same_work(peers, monkeypatch):
    fake, engine = vllm_of(peers, monkeypatch)
    assert engine.generate(Work) >= 0 and fake.resets == 1
    assert fake.settings == {"model": "model", "dtype": "float32", "max_num_seqs": 4, "max_model_len": 14}
    assert [prompt for prompt, _ in fake.asked] == [p.tolist() for p in Work.prompts]
    assert [(s.n, s.max_tokens, s.temperature, s.ignore_eos) for _, s in fake.asked] == [(2, n, 0.5, True) for n in (4, 9, 3)]
    engine.generate(Work, most=1)
    assert {s.max_tokens for _, s in fake.asked[3:]} == {1}


def test_work_that_was_not_done_is_no_measurement(peers, monkeypatch):
    _, engine = vllm_of(peers, monkeypatch, off=-1)
    with pytest.raises(AssertionError):
        engine.generate(Work)


def test_what_is_missing_is_one_line(peers, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, install in (("vllm", "vllm"), ("tunix", "google-tunix"), ("transformers", "torch")):
        with pytest.raises(SystemExit, match=f"^error: --engine {name}: .*; pip install {install}$"):
            peers.make(name, "model", Work, 4)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    with pytest.raises(SystemExit, match=f"^error: --engine vllm --model {tmp_path}: it reads Hugging Face directories"):
        peers.make("vllm", str(tmp_path), Work, 4)
