"""Configurations: published files are read in both spellings, and what is not supported is refused by name."""

import dataclasses

import pytest
from model_cases import Case

from marl_jax.models import ModelConfig
from marl_jax.models.model_config import PRESETS
from marl_jax.models.weight_table import num_parameters


def published(hidden, mlp, layers, heads):
    """The `config.json` of a Qwen3 model as published."""
    shape = Case(151936, hidden, mlp, layers, heads, kv_heads=8, head_dim=128, theta=1000000, tied=True)
    return {
        **shape.config(),
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "initializer_range": 0.02,
        "max_window_layers": layers,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
    }


def newer(config):
    """The same file as transformers 5 spells it."""
    config = dict(config, transformers_version="5.0.0", dtype=config["torch_dtype"], pad_token_id=None)
    config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    config["rope_parameters"] = {"rope_theta": float(config.pop("rope_theta")), "rope_type": "default"}
    del config["torch_dtype"], config["rope_scaling"]
    return config


PUBLISHED = {
    "0.6b": published(1024, 3072, 28, 16),
    "1.7b": published(2048, 6144, 28, 16),
    "4b": published(2560, 9728, 36, 32),
}


def both_dtypes(config):
    return config | {"dtype": f"torch.{config['torch_dtype']}"}


@pytest.mark.parametrize("spelling", [dict, newer, both_dtypes])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_the_presets_in_both_spellings(name, spelling):
    assert ModelConfig.from_hf(spelling(PUBLISHED[name])) == ModelConfig.preset(name)


@pytest.mark.parametrize(
    ("name", "count"), [("0.6b", 596_049_920), ("1.7b", 1_720_574_976), ("4b", 4_022_468_096)]
)
def test_presets_have_the_published_number_of_parameters(name, count):
    assert num_parameters(ModelConfig.preset(name)) == count


@pytest.mark.parametrize(("name", "count"), [("xs", 0.1e6), ("s", 0.4e6), ("m", 1.6e6)])
def test_micro_scales_have_about_the_size_they_name(name, count):
    config = ModelConfig.preset(name)
    assert abs(num_parameters(config) / count - 1) < 0.1
    assert config.head_dim == 32
    assert config.num_key_value_heads < config.num_attention_heads


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_written_is_read_back_and_carries_both_spellings(name):
    config = ModelConfig.preset(name)
    written = config.to_hf()
    assert ModelConfig.from_hf(written) == config
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == config.rope_theta
    assert written["dtype"] == written["torch_dtype"] == config.dtype


def test_configs_can_key_a_cache():
    assert len({ModelConfig.preset("xs"), dataclasses.replace(ModelConfig.preset("xs"))}) == 1


def test_several_end_tokens_are_kept():
    config = ModelConfig.from_hf(PUBLISHED["0.6b"] | {"eos_token_id": [151645, 151643]})
    assert config.stop_tokens == (151645, 151643)
    assert config.to_hf()["eos_token_id"] == [151645, 151643]
    assert ModelConfig.preset("0.6b").stop_tokens == (151645,)
    assert dataclasses.replace(config, eos_token_id=None).stop_tokens == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, "model_type is 'qwen2'; only 'qwen3'"),
        ({"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe'"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "architectures is"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling asks for RoPE scaling 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling asks for RoPE scaling 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters asks for RoPE scaling 'llama3'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters has 'partial_rotary_factor'"),
        ({"rope_parameters": {"rope_theta": 5.0}}, r"rope_theta is written twice with different values"),
        ({"rope_theta": None}, "lacks rope_theta"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        ({"dtype": "float32"}, "dtype and torch_dtype disagree"),
        ({"torch_dtype": "float16"}, "dtype is 'float16'; load the weights as one of float32, bfloat16"),
        ({"head_dim": None}, "lacks head_dim"),
        ({"vocab_size": None, "hidden_size": None}, "lacks vocab_size, hidden_size"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be at least 1"),
        ({"num_hidden_layers": "28"}, "num_hidden_layers is '28'"),
        (
            {"num_key_value_heads": 6},
            r"num_attention_heads \(16\) must be a multiple of num_key_value_heads \(6\)",
        ),
        ({"head_dim": 127}, "head_dim is 127"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": 151936}, r"eos_token_id is 151936; token ids of this model are 0..151935"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        ModelConfig.from_hf(PUBLISHED["0.6b"] | change)
    assert "\n" not in str(caught.value)


def test_a_preset_with_another_vocabulary_says_how_to_leave_its_special_tokens():
    preset = ModelConfig.preset("0.6b")
    way_out = (
        r"bos_token_id is 151643; .* 0\.\.511; .* pass None for bos_token_id, eos_token_id, or write null in"
    )
    with pytest.raises(ValueError, match=way_out):
        dataclasses.replace(preset, vocab_size=512)
    small = dataclasses.replace(preset, vocab_size=512, bos_token_id=None, eos_token_id=None)
    assert small.vocab_size == 512
    with pytest.raises(ValueError, match=r"pad_token_id is 512; .* eos_token_id, pad_token_id, or"):
        dataclasses.replace(small, pad_token_id=512)


def test_an_unknown_preset_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"no preset '8b'; there are 0.6b, 1.7b, 4b, xs, s, m"):
        ModelConfig.preset("8b")
