"""The architecture facts: sizes against published ones, config.json there and back, refusals by name."""

import json

import pytest
from transformers import AutoConfig

from jrl.errors import UserError
from jrl.models.arch import KNOWN, Arch, RopeScaling

PUBLISHED_PARAMS = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen2.5-72B-Instruct": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
}


@pytest.mark.parametrize("name", PUBLISHED_PARAMS)
def test_known_models_have_their_published_number_of_parameters(name):
    assert KNOWN[name].num_params() == PUBLISHED_PARAMS[name]


@pytest.mark.parametrize("name", KNOWN)
def test_config_json_round_trips(name):
    assert Arch.from_hf_config(json.loads(json.dumps(KNOWN[name].to_hf_config()))) == KNOWN[name]


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-0.6B"])
def test_transformers_reads_the_written_config_alike(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(KNOWN[name].to_hf_config()))
    config = AutoConfig.from_pretrained(tmp_path)
    assert Arch.from_hf_config(config.to_dict()) == KNOWN[name]
    assert config.rope_parameters["rope_theta"] == KNOWN[name].rope_theta
    assert config.rope_parameters["rope_type"] == ("llama3" if "Llama-3.2" in name else "default")


def test_both_spellings_of_rope_parameters_are_read():
    base = KNOWN["meta-llama/Llama-3.1-8B"].to_hf_config()
    scaling = base.pop("rope_scaling")
    theta = base.pop("rope_theta")
    nested = Arch.from_hf_config(base | {"rope_parameters": scaling | {"rope_theta": theta}})
    old = Arch.from_hf_config(base | {"rope_theta": theta, "rope_scaling": {"type": "linear", "factor": 4}})
    assert nested == KNOWN["meta-llama/Llama-3.1-8B"]
    assert old.rope_scaling == RopeScaling("linear", 4.0)


def test_defaults_of_absent_keys_are_those_of_transformers():
    needed = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4}
    for family, head_dim in (("llama", 16), ("qwen2", 16), ("qwen3", 128)):
        arch = Arch.from_hf_config(needed | {"model_type": family})
        assert (arch.head_dim, arch.num_kv_heads, arch.rope_theta, arch.rms_norm_eps) == (head_dim, 4, 10000.0, 1e-6)
        assert not arch.tie_embeddings and arch.rope_scaling is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": None}, "model_type"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused_by_name(change, named):
    config = KNOWN["Qwen/Qwen2.5-0.5B"].to_hf_config()
    Arch.from_hf_config(config)
    with pytest.raises(UserError, match=named):
        Arch.from_hf_config(config | change)


def test_a_model_that_could_not_be_exported_is_refused():
    arch = KNOWN["meta-llama/Llama-3.2-1B"]
    with pytest.raises(UserError, match="qkv_bias=True"):
        Arch(**{**vars(arch), "qkv_bias": True})
