"""`config.json` in both directions, and what it must refuse."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from flashspec.models import PRESETS, DecoderConfig, RopeScaling
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
    assert qwen.traits.qk_norm


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
    ("rope_scaling", {"rope_type": "linear"}),
    ("rope_scaling", {"rope_type": "linear", "factor": 2.0, "beta": 1}),
    ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}),
    ("rope_scaling", {"rope_type": ["linear"], "factor": 2.0}),
    ("rope_parameters", {"full_attention": {}, "sliding_attention": {}}),
    ("rope_local_base_freq", 1e4),
    ("query_pre_attn_scalar", 256),
    ("final_logit_softcapping", 30.0),
    ("use_mrope", True),
    ("rope_interleaved", True),
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


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}
GEMMA2 = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}


def test_a_window_on_the_upper_layers() -> None:
    config = DecoderConfig.from_hf(LLAMA | QWEN2 | {"max_window_layers": 1})
    assert config.windows == (None, (7, 0))
    assert config.window is None
    assert DecoderConfig.from_hf(LLAMA | QWEN2 | {"max_window_layers": 0}).window == (7, 0)
    assert DecoderConfig.from_hf(LLAMA | QWEN2 | {"max_window_layers": 2}).sliding_window is None


def test_windows_that_alternate() -> None:
    usual = DecoderConfig.from_hf(LLAMA | GEMMA2 | {"head_dim": 8})
    assert usual.windows == ((4095, 0), None)
    sizes = {"num_hidden_layers": 7, "head_dim": 8, "sliding_window": 5}
    assert DecoderConfig.from_hf(LLAMA | GEMMA3 | sizes).full_layers == (5,)
    assert DecoderConfig.from_hf(LLAMA | GEMMA3 | sizes | {"sliding_window_pattern": 3}).full_layers == (2, 5)
    listed = ["full_attention", *(["sliding_attention"] * 6)]
    assert DecoderConfig.from_hf(LLAMA | GEMMA3 | sizes | {"layer_types": listed}).full_layers == (0,)


def test_what_gemma_leaves_out() -> None:
    two, three = (DecoderConfig.from_hf(LLAMA | family) for family in (GEMMA2, GEMMA3))
    assert (two.attention_soft_cap, two.final_soft_cap, two.query_pre_attn_scalar) == (50.0, 30.0, 256)
    assert (three.rope_theta, three.local_rope_theta, three.final_soft_cap) == (1e6, 1e4, None)
    assert two.tie_embeddings
    assert two.head_dim == 256
    assert DecoderConfig.from_hf(LLAMA | GEMMA2 | {"attn_logit_softcapping": None}).attention_soft_cap is None


def test_rotations_of_both_spellings() -> None:
    scaled = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 1e6, "rope_local_base_freq": 5e3, "rope_scaling": scaled}
    full, sliding = {"rope_theta": 1e6, **scaled}, {"rope_type": "default", "rope_theta": 5e3}
    new = {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
    configs = [DecoderConfig.from_hf(LLAMA | GEMMA3 | {"num_hidden_layers": 6} | spelt) for spelt in (old, new)]
    assert configs[0] == configs[1]
    assert configs[0].rotations == (*(((5e3, None),) * 5), (1e6, RopeScaling("linear", 8.0)))


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        (QWEN2, "layer_types", ["sliding_attention"]),
        (QWEN2, "layer_types", ["sliding_attention", "other"]),
        (QWEN2 | {"use_sliding_window": False}, "layer_types", ["full_attention", "sliding_attention"]),
        (QWEN2, "max_window_layers", -1),
        (QWEN2, "use_sliding_window", "no"),
        (QWEN2 | {"max_window_layers": 0}, "sliding_window", "8"),
        (QWEN2 | {"max_window_layers": 0}, "sliding_window", 0),
        (GEMMA2, "layer_types", [["sliding_attention"], "full_attention"]),
        (GEMMA2, "sliding_window_pattern", 0),
        (GEMMA2, "sliding_window_size", 8),
        (GEMMA2, "hidden_activation", "silu"),
        (GEMMA2, "hidden_act", "silu"),
        (GEMMA2, "final_logit_softcapping", -1.0),
        (GEMMA2, "query_pre_attn_scalar", "many"),
        (GEMMA2, "rope_local_base_freq", 1e4),
        (GEMMA3, "attn_logit_softcapping", 50.0),
        (GEMMA3, "use_bidirectional_attention", True),
    ],
)
def test_what_a_family_does_not_compute_is_refused_by_name(family: dict[str, Any], key: str, value: Any) -> None:
    own = {"final_logit_softcapping": "final_soft_cap"}.get(key, key)
    with pytest.raises(ValueError, match=f"`{own}`: expected"):
        DecoderConfig.from_hf(LLAMA | family | {key: value})


def test_an_option_of_another_family_is_refused_by_name() -> None:
    for option in ({"attention_soft_cap": 5.0}, {"full_layers": (0,)}, {"local_rope_theta": 5.0}):
        with pytest.raises(ValueError, match=f"`{next(iter(option))}`: expected none for the family 'mistral'"):
            dataclasses.replace(CONFIGS["mistral"], **option)
    with pytest.raises(ValueError, match="`full_layers`"):
        dataclasses.replace(CONFIGS["qwen3"], full_layers=(0,))


def test_a_model_cut_short_keeps_its_pattern() -> None:
    cut = dataclasses.replace(PRESETS["gemma-3-1b"], num_layers=7)
    assert cut.full_layers == (5,)


# `config.json` as the models' authors write them, with all of their keys.
PUBLISHED = json.loads((Path(__file__).parent / "published.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_the_published_file(name: str) -> None:
    assert DecoderConfig.from_hf(PUBLISHED[name]) == PRESETS[name]


WITH_IMAGES = PUBLISHED["gemma-3-4b"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, "`text_config`: expected the text model's configuration"),
        ({"text_config": {"model_type": "gemma2"}}, "`text_config.model_type`: expected 'gemma3_text'"),
        ({"model_type": "gemma3n"}, "`model_type`: expected 'gemma3'"),
        ({"audio_config": {}}, "`audio_config`: expected no option that this decoder does not know"),
        ({"tie_word_embeddings": False}, "`tie_word_embeddings`: expected the text_config's"),
        ({"text_config": {"final_logit_softcapping": 30.0}}, "`final_logit_softcapping`: expected null"),
        ({"text_config": {"attn_logit_softcapping": 30.0}}, "`attn_logit_softcapping`: expected None"),
        ({"text_config": {"rope_scaling": {"rope_type": "yarn"}}}, "`rope_scaling`: expected rope_type"),
        ({"architectures": ["Gemma3nForConditionalGeneration"]}, "`architectures`: .*Gemma3ForConditionalGeneration"),
    ],
)
def test_what_a_model_with_a_vision_tower_may_not_say(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_hf(WITH_IMAGES | change)


def test_what_is_said_of_the_whole_model_holds_for_its_text() -> None:
    small = WITH_IMAGES | {"text_config": WITH_IMAGES["text_config"] | {"num_attention_heads": 16, "vocab_size": None}}
    config = DecoderConfig.from_hf(small | {"eos_token_id": 7})
    assert (config.num_heads, config.num_kv_heads, config.vocab_size, config.eos_token_ids) == (16, 4, 262208, (7,))
    alone = dict(small["text_config"]) | {"architectures": ["Gemma3ForCausalLM"]}
    with pytest.raises(ValueError, match=r"num_key_value_heads|vocab_size"):  # by itself it may not leave these out
        DecoderConfig.from_hf(alone)


def test_it_is_a_static_argument() -> None:
    assert hash(DecoderConfig.from_hf(LLAMA)) == hash(DecoderConfig.from_hf(dict(LLAMA)))
