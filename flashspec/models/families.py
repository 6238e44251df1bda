"""The architectures that the decoder computes, as data: what their members share and what `config.json` may leave out.

A family is named by Hugging Face's `model_type`. What differs between members (sizes, rotary base, window, soft caps)
is in `DecoderConfig`; what is the same for all of them is here.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

WINDOWS = frozenset({"sliding_window", "full_layers"})
QUERY_SCALE_AND_CAP = frozenset({"query_pre_attn_scalar", "final_soft_cap"})


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
      architecture: its class in Hugging Face's library.
      qk_norm: queries and keys are normalised per head before the rotation.
      qkv_bias: queries, keys and values have a bias.
      post_norms: what each branch adds to the residual stream is normalised as well.
      unit_offset: norms multiply by 1 + weight, in float32.
      scaled_embeddings: embeddings are multiplied by sqrt(hidden_size).
      activation: of the gated MLP, "silu" or "gelu_pytorch_tanh".
      activation_key: where `config.json` names it.
      options: fields of `DecoderConfig` that members may set.
      window_switch: whether `use_sliding_window` and `max_window_layers` decide which layers have the window.
      full_every: every so many layers one attends to the whole prefix, where `config.json` says nothing else.
      defaults: values, by field of `DecoderConfig`, that hold where `config.json` has no such key.
    """

    architecture: str
    qk_norm: bool = False
    qkv_bias: bool = False
    post_norms: bool = False
    unit_offset: bool = False
    scaled_embeddings: bool = False
    activation: str = "silu"
    activation_key: str = "hidden_act"
    options: frozenset[str] = frozenset()
    window_switch: bool = False
    full_every: int | None = None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_GEMMA: dict[str, Any] = {
    "post_norms": True,
    "unit_offset": True,
    "scaled_embeddings": True,
    "activation": "gelu_pytorch_tanh",
    "activation_key": "hidden_activation",
}
_GEMMA_DEFAULTS = {"head_dim": 256, "tie_embeddings": True, "sliding_window": 4096, "query_pre_attn_scalar": 256}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family(
        "MistralForCausalLM",
        options=frozenset({"sliding_window"}),
        defaults={"sliding_window": 4096, "max_position_embeddings": 131072},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        qkv_bias=True,
        options=WINDOWS,
        window_switch=True,
        defaults={"sliding_window": 4096, "max_position_embeddings": 32768},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        qk_norm=True,
        options=WINDOWS,
        window_switch=True,
        defaults={"head_dim": 128, "sliding_window": 4096, "max_position_embeddings": 32768},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        options=WINDOWS | QUERY_SCALE_AND_CAP | {"attention_soft_cap"},
        full_every=2,
        defaults=_GEMMA_DEFAULTS
        | {"max_position_embeddings": 8192, "attention_soft_cap": 50.0, "final_soft_cap": 30.0},
        **_GEMMA,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        qk_norm=True,
        options=WINDOWS | QUERY_SCALE_AND_CAP | {"local_rope_theta"},
        full_every=6,
        defaults=_GEMMA_DEFAULTS | {"max_position_embeddings": 131072, "rope_theta": 1e6, "local_rope_theta": 10000.0},
        **_GEMMA,
    ),
}
