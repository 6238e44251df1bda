"""`config.json` in both directions, and what it must refuse."""

from typing import Any

import pytest

from flashspec.models import PRESETS, DecoderConfig
from tests.models.examples import CONFIGS

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize("name", [*CONFIGS, *PRESETS])
def test_round_trip(name: str) -> None:
    config = CONFIGS.get(name) or PRESETS[name]
    assert DecoderConfig.from_hf(config.to_hf()) == config


def test_defaults_of_the_family() -> None:
    config = DecoderConfig.from_hf(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.rms_norm_eps) == (4, 8, 10000.0, 1e-6)
    assert not config.tie_embeddings
    qwen = DecoderConfig.from_hf(LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
    assert qwen.head_dim == 128
    assert qwen.qk_norm


def test_rope_parameters_in_the_new_spelling() -> None:
    nested = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert DecoderConfig.from_hf(LLAMA | nested).rope_theta == 5e5


def test_a_window_of_w_is_w_minus_one_keys_to_the_left() -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4}
    assert DecoderConfig.from_hf(LLAMA | mistral).window == (3, 0)


def test_a_window_that_is_switched_off() -> None:
    qwen = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "sliding_window": 4096}
    assert DecoderConfig.from_hf(LLAMA | qwen | {"use_sliding_window": False, "max_window_layers": 28}).window is None


def test_several_end_tokens() -> None:
    assert DecoderConfig.from_hf(LLAMA | {"eos_token_id": [3, 4]}).eos_token_ids == (3, 4)
    assert DecoderConfig.from_hf(LLAMA | {"eos_token_id": 0}).eos_token_ids == (0,)


REFUSED = [
    ("architectures", ["GPT2LMHeadModel"]),
    ("architectures", None),
    ("model_type", "mixtral"),
    ("hidden_act", "gelu"),
    ("attention_bias", True),
    ("mlp_bias", True),
    ("rope_scaling", {"rope_type": "llama3", "factor": 32.0}),
    ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
    ("partial_rotary_factor", 0.5),
    ("quantization_config", {"bits": 4}),
    ("sliding_window", 128),
    ("layer_types", ["full_attention", "sliding_attention"]),
    ("attn_logit_softcapping", 50.0),
    ("head_dim", 7),
    ("num_key_value_heads", 3),
    ("vocab_size", 0),
    ("vocab_size", "100"),
    ("num_attention_heads", 0),
    ("num_attention_heads", "4"),
    ("num_key_value_heads", 0),
    ("head_dim", 0),
    ("architectures", "LlamaForCausalLM"),
    ("architectures", 5),
    ("tie_word_embeddings", "false"),
    ("rms_norm_eps", "small"),
    ("rms_norm_eps", -1e-6),
    ("rope_theta", "ten"),
    ("rope_theta", 0),
    ("rope_theta", float("inf")),
    ("rope_scaling", [1]),
    ("max_position_embeddings", "512"),
    ("layer_types", 5),
    ("eos_token_id", "</s>"),
    ("eos_token_id", [1, -1]),
]

# How the decoder's own configuration calls them.
OWN_NAMES = {
    "num_key_value_heads": "num_(kv_)?heads",
    "tie_word_embeddings": "tie_embeddings",
    "eos_token_id": "eos_token_ids",
}


@pytest.mark.parametrize(("key", "value"), REFUSED)
def test_what_is_not_computed_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{OWN_NAMES.get(key, key)}`: expected"):
        DecoderConfig.from_hf(LLAMA | {key: value})


def test_null_is_as_absent() -> None:
    absent = dict.fromkeys(("rms_norm_eps", "rope_theta", "tie_word_embeddings", "head_dim", "layer_types"))
    assert DecoderConfig.from_hf(LLAMA | absent) == DecoderConfig.from_hf(LLAMA)


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ValueError, match="intermediate_size"):
        DecoderConfig.from_hf({key: value for key, value in LLAMA.items() if key != "intermediate_size"})


def test_a_window_on_some_layers_only_is_refused() -> None:
    qwen = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "sliding_window": 8,
        "use_sliding_window": True,
    }
    with pytest.raises(ValueError, match="max_window_layers"):
        DecoderConfig.from_hf(LLAMA | qwen | {"max_window_layers": 1})


def test_it_is_a_static_argument() -> None:
    assert hash(DecoderConfig.from_hf(LLAMA)) == hash(DecoderConfig.from_hf(dict(LLAMA)))
