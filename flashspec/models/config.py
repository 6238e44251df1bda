"""The shape of a decoder, read from and written to Hugging Face's `config.json`; families and presets as data.

A configuration either describes exactly what `flashspec.models.decoder` computes, or is refused: an architecture that
is unknown, or an option that changes the result and that the decoder does not have, is an error that names it.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from flashspec.checks import at_least, fail, one_of


@dataclasses.dataclass(frozen=True)
class Family:
    """What the members of one architecture share: its Hugging Face name, and what `config.json` may leave out."""

    architecture: str
    qk_norm: bool = False
    has_window: bool = False
    needs_window_switch: bool = False
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", has_window=True, max_position_embeddings=131072),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        qk_norm=True,
        has_window=True,
        needs_window_switch=True,
        head_dim=128,
        max_position_embeddings=32768,
    ),
}

# Options that change the result and are not implemented, with the values at which they change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1, 1.0),
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
}

# Keys that have no bearing on the logits of a forward pass without dropout.
INERT = """architectures model_type torch_dtype dtype transformers_version use_cache initializer_range attention_dropout
pretraining_tp pad_token_id return_dict output_attentions output_hidden_states torchscript name_or_path finetuning_task
id2label label2id problem_type chunk_size_feed_forward tokenizer_class task_specific_params"""

READ = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
rms_norm_eps max_position_embeddings tie_word_embeddings bos_token_id eos_token_id sliding_window use_sliding_window
max_window_layers layer_types rope_theta rope_scaling rope_parameters"""

KNOWN = frozenset((*INERT.split(), *READ.split(), *NEUTRAL))


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Static description of a decoder-only transformer; hashable, so that it may be a static argument of `jax.jit`.

    Attributes:
      family: a key of `FAMILIES`.
      vocab_size: V.
      hidden_size: width of the residual stream.
      intermediate_size: width of the gated MLP.
      num_layers: decoder layers.
      num_heads: N, query heads.
      num_kv_heads: K, key/value heads; divides N.
      head_dim: H, even (rotary pairs); N * H need not be `hidden_size`.
      rope_theta: base of the rotary frequencies.
      rms_norm_eps: added to the mean square inside the root.
      tie_embeddings: the output head is the transposed embedding.
      sliding_window: W as Hugging Face counts it, the query's own position included; None for no window.
      max_position_embeddings: context the model was trained for; a fact for users, not a limit.
      bos_token_id, eos_token_ids: ids for users of the model; no computation reads them.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    sliding_window: int | None = None
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        one_of("family", self.family, tuple(FAMILIES))
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            at_least(name, getattr(self, name), 1)
        at_least("head_dim", self.head_dim, 2)
        at_least("max_position_embeddings", self.max_position_embeddings, 1)
        for name in ("rope_theta", "rms_norm_eps"):
            _positive(name, getattr(self, name))
        if not isinstance(self.tie_embeddings, bool):
            raise fail("tie_embeddings", "true or false", repr(self.tie_embeddings))
        for token in self.eos_token_ids:
            at_least("eos_token_ids", token, 0)
        if self.head_dim % 2:
            raise fail("head_dim", "an even size (rotary positions turn pairs)", self.head_dim)
        if self.num_heads % self.num_kv_heads:
            raise fail("num_heads", f"a multiple of num_kv_heads = {self.num_kv_heads}", self.num_heads)
        if self.sliding_window is not None:
            at_least("sliding_window", self.sliding_window, 1)
            if not FAMILIES[self.family].has_window:
                raise fail("sliding_window", f"None for the family {self.family!r}", self.sliding_window)

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head before the rotation."""
        return FAMILIES[self.family].qk_norm

    @property
    def window(self) -> tuple[int, int] | None:
        """The attention window as (left, right) keys besides the query's own; Hugging Face's W is left = W - 1."""
        return None if self.sliding_window is None else (self.sliding_window - 1, 0)

    @property
    def num_parameters(self) -> int:
        """Parameters held, a tied head counted once."""
        rows = self.num_heads + self.num_kv_heads
        attention = 2 * rows * self.head_dim * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = (1 if self.tie_embeddings else 2) * self.vocab_size * self.hidden_size
        return self.num_layers * layer + embeddings + self.hidden_size

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "DecoderConfig":
        """The configuration that a parsed `config.json` describes.

        Raises:
          ValueError: the architecture is unknown, a size is missing, or an option changes the result and is not
            implemented.
        """
        name = _family_of(values)
        family = FAMILIES[name]
        _refuse_unknown(values)
        heads, hidden = (at_least(key, _required(values, key), 1) for key in ("num_attention_heads", "hidden_size"))
        eos = values.get("eos_token_id")
        return cls(
            family=name,
            vocab_size=_required(values, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_required(values, "intermediate_size"),
            num_layers=_required(values, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_given(values, "num_key_value_heads", heads),
            head_dim=_given(values, "head_dim", family.head_dim or hidden // heads),
            rope_theta=_rope_theta(values),
            rms_norm_eps=_given(values, "rms_norm_eps", family.rms_norm_eps),
            tie_embeddings=_given(values, "tie_word_embeddings", False),
            sliding_window=_sliding_window(values, family),
            max_position_embeddings=_given(values, "max_position_embeddings", family.max_position_embeddings),
            bos_token_id=values.get("bos_token_id"),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        )

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """The `config.json` of this configuration, with parameters stored in `dtype`."""
        family = FAMILIES[self.family]
        eos = list(self.eos_token_ids)
        values = {
            "architectures": [family.architecture],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            "torch_dtype": dtype,
        }
        if family.has_window:
            values["sliding_window"] = self.sliding_window
        if family.needs_window_switch:
            values |= {"use_sliding_window": self.sliding_window is not None, "max_window_layers": 0}
        return values


def _family_of(values: Mapping[str, Any]) -> str:
    known = {family.architecture: name for name, family in FAMILIES.items()}
    architectures = values.get("architectures") or [None]
    if not isinstance(architectures, list):
        raise fail("architectures", "a list", repr(architectures))
    names = ", ".join(known)
    if len(architectures) != 1 or architectures[0] not in known:
        raise fail("architectures", f"one of {names}", architectures)
    name = known[architectures[0]]
    if values.get("model_type", name) != name:
        raise fail("model_type", f"{name!r} with architecture {architectures[0]}", repr(values["model_type"]))
    return name


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise fail(name, "a finite number above 0", repr(value))


def _given(values: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of a key, or the default where it is absent or null."""
    value = values.get(key)
    return default if value is None else value


def _required(values: Mapping[str, Any], key: str) -> Any:
    if key not in values:
        raise fail(key, "a size in config.json", "nothing")
    return values[key]


def _refuse_unknown(values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if key in NEUTRAL and value not in NEUTRAL[key]:
            raise fail(
                key, f"{NEUTRAL[key][0]!r} (other values change the result and are not implemented)", repr(value)
            )
        if key not in KNOWN and not key.startswith("_"):
            raise fail(key, "no option that this decoder does not know (it may change the result)", repr(value))


def _rope_theta(values: Mapping[str, Any]) -> float:
    """The rotary base, from the old (`rope_theta`, `rope_scaling`) or the new (`rope_parameters`) spelling."""
    for key in ("rope_scaling", "rope_parameters"):
        parameters = values.get(key) or {}
        if not isinstance(parameters, dict):
            raise fail(key, "an object or null", repr(parameters))
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind != "default" or set(parameters) - {"rope_type", "type", "rope_theta"}:
            raise fail(key, "no scaling (rope_type 'default')", repr(parameters))
    theta = _given(values, "rope_theta", _given(values.get("rope_parameters") or {}, "rope_theta", 10000.0))
    _positive("rope_theta", theta)
    return float(theta)


def _sliding_window(values: Mapping[str, Any], family: Family) -> int | None:
    """W when every layer has the same window; a mixture of windowed and full layers is refused."""
    window = values.get("sliding_window")
    if family.needs_window_switch and not values.get("use_sliding_window", False):
        window = None
    if not family.has_window and window is not None:
        raise fail("sliding_window", f"None for {family.architecture}", window)
    if window is not None and family.needs_window_switch and values.get("max_window_layers", 0) != 0:
        raise fail(
            "max_window_layers", "0: a window on some layers only is not implemented", values["max_window_layers"]
        )
    kind = "full_attention" if window is None else "sliding_attention"
    layers = values.get("layer_types") or []
    if not isinstance(layers, list) or any(layer != kind for layer in layers):
        raise fail("layer_types", f"{kind!r} on every layer", values["layer_types"])
    return window


def _preset(family: str, sizes: tuple[int, int, int, int, int, int, int], **rest: Any) -> DecoderConfig:
    vocab, hidden, inner, layers, heads, kv_heads, head_dim = sizes
    return DecoderConfig(family, vocab, hidden, inner, layers, heads, kv_heads, head_dim, **rest)


# Sizes in the order of V, hidden, MLP, layers, N, K, H.
PRESETS: dict[str, DecoderConfig] = {
    "llama-2-7b": _preset(
        "llama", (32000, 4096, 11008, 32, 32, 32, 128), rms_norm_eps=1e-5, max_position_embeddings=4096
    ),
    "llama-3-8b": _preset(
        "llama", (128256, 4096, 14336, 32, 32, 8, 128), rope_theta=5e5, rms_norm_eps=1e-5, max_position_embeddings=8192
    ),
    # The sizes of Llama 3.2 1B without its scaling of the rotary frequencies, which is not implemented.
    "llama-3-1b-shape": _preset(
        "llama",
        (128256, 2048, 8192, 16, 32, 8, 64),
        rope_theta=5e5,
        rms_norm_eps=1e-5,
        tie_embeddings=True,
        max_position_embeddings=8192,
    ),
    "mistral-7b": _preset(
        "mistral",
        (32000, 4096, 14336, 32, 32, 8, 128),
        rms_norm_eps=1e-5,
        sliding_window=4096,
        max_position_embeddings=32768,
    ),
    "qwen3-0.6b": _preset(
        "qwen3",
        (151936, 1024, 3072, 28, 16, 8, 128),
        rope_theta=1e6,
        tie_embeddings=True,
        max_position_embeddings=40960,
    ),
    "qwen3-8b": _preset("qwen3", (151936, 4096, 12288, 36, 32, 8, 128), rope_theta=1e6, max_position_embeddings=40960),
}
