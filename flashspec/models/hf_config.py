"""Hugging Face's `config.json` and the fields of a `DecoderConfig`, in both directions.

A key is read, or has no bearing on the logits, or must have the value at which it changes nothing; any other key, and
any other value, is an error that names it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flashspec.checks import at_least, fail, flag
from flashspec.models import multimodal
from flashspec.models.families import FAMILIES, Family
from flashspec.models.rotary import LINEAR, LLAMA3, RopeScaling, positive

if TYPE_CHECKING:
    from flashspec.models.config import DecoderConfig

FULL, SLIDING = "full_attention", "sliding_attention"

# Options that change the result and are not implemented, with the values at which they change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, 1.0, None),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
    "use_bidirectional_attention": (False, None),
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
}

# Keys that have no bearing on the logits of a forward pass without dropout.
INERT = """architectures model_type torch_dtype dtype transformers_version use_cache initializer_range attention_dropout
pretraining_tp pad_token_id return_dict output_attentions output_hidden_states torchscript name_or_path finetuning_task
id2label label2id problem_type chunk_size_feed_forward tokenizer_class task_specific_params cache_implementation
is_llama_config transformers.js_config"""

READ = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
rms_norm_eps max_position_embeddings tie_word_embeddings bos_token_id eos_token_id hidden_act hidden_activation
sliding_window sliding_window_size use_sliding_window max_window_layers sliding_window_pattern layer_types rope_theta
rope_scaling rope_parameters"""

# Numbers that only some families read; null is none, and elsewhere they must be absent or null.
OPTIONS = {
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "attn_logit_softcapping": "attention_soft_cap",
    "final_logit_softcapping": "final_soft_cap",
    "rope_local_base_freq": "local_rope_theta",
}

KNOWN = frozenset((*INERT.split(), *READ.split(), *NEUTRAL, *OPTIONS))
LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `DecoderConfig` that a parsed `config.json` stands for; of a model that also reads images, those
    of its text model.

    Raises:
      ValueError: an unknown architecture or key, a missing size, or a value that is not implemented; named.
    """
    values = multimodal.text_config(values)
    name = _family_of(values)
    family = FAMILIES[name]
    _refuse_unknown(values, family)
    layers = at_least("num_hidden_layers", _required(values, "num_hidden_layers"), 1)
    heads, hidden = (at_least(key, _required(values, key), 1) for key in ("num_attention_heads", "hidden_size"))
    window, full_layers = _windows(values, family, layers)
    eos = values.get("eos_token_id")
    found = {
        "family": name,
        "vocab_size": _required(values, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": _required(values, "intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": _given(values, "num_key_value_heads", heads),
        "head_dim": _given(values, "head_dim", family.defaults.get("head_dim", hidden // heads)),
        "rms_norm_eps": _given(values, "rms_norm_eps", 1e-6),
        "tie_embeddings": _given(values, "tie_word_embeddings", family.defaults.get("tie_embeddings", False)),
        "max_position_embeddings": _given(
            values, "max_position_embeddings", family.defaults.get("max_position_embeddings", 2048)
        ),
        "bos_token_id": values.get("bos_token_id"),
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        "sliding_window": window,
        "full_layers": full_layers,
    }
    options = {field: values.get(key, family.defaults.get(field)) for key, field in OPTIONS.items()}
    return found | options | _rope(values, family)


def document(config: "DecoderConfig", dtype: str) -> dict[str, Any]:
    """The `config.json` of a configuration, with parameters stored in `dtype`."""
    family, eos = config.traits, list(config.eos_token_ids)
    values = {
        "architectures": [family.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        family.activation_key: family.activation,
        "attention_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else _scaling_document(config.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "torch_dtype": dtype,
    }
    values |= {key: getattr(config, field) for key, field in OPTIONS.items() if field in family.options}
    if "query_pre_attn_scalar" in family.options and config.query_pre_attn_scalar is None:
        values["query_pre_attn_scalar"] = config.head_dim
    if "sliding_window" in family.options:
        values["sliding_window"] = config.sliding_window
    if family.window_switch:
        values |= {"use_sliding_window": config.sliding_window is not None, "max_window_layers": 0}
    if "full_layers" in family.options:
        values["layer_types"] = [FULL if window is None else SLIDING for window in config.windows]
    return values


def _family_of(values: Mapping[str, Any]) -> str:
    known = {family.architecture: name for name, family in FAMILIES.items()}
    architectures = values.get("architectures") or [None]
    if not isinstance(architectures, list):
        raise fail("architectures", "a list", repr(architectures))
    names = ", ".join((*known, *multimodal.ARCHITECTURES))
    if len(architectures) != 1 or architectures[0] not in known:
        raise fail("architectures", f"one of {names}", architectures)
    name = known[architectures[0]]
    if values.get("model_type", name) != name:
        raise fail("model_type", f"{name!r} with architecture {architectures[0]}", repr(values["model_type"]))
    return name


def _given(values: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of a key, or the default where it is absent or null."""
    value = values.get(key)
    return default if value is None else value


def _required(values: Mapping[str, Any], key: str) -> Any:
    if key not in values:
        raise fail(key, "a size in config.json", "nothing")
    return values[key]


def _refuse_unknown(values: Mapping[str, Any], family: Family) -> None:
    for key, value in values.items():
        if key not in KNOWN and not key.startswith("_"):
            raise fail(key, "no option that this decoder does not know (it may change the result)", repr(value))
        allowed = NEUTRAL.get(key)
        if key in OPTIONS and OPTIONS[key] not in family.options:
            allowed = (None,)
        if key in ("hidden_act", "hidden_activation"):
            allowed = (family.activation, None)
        if allowed is not None and value not in allowed:
            raise fail(key, f"{allowed[0]!r} (other values change the result and are not implemented)", repr(value))


def _rope(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The rotary fields, from the old (`rope_theta`, `rope_scaling`) or the new (`rope_parameters`) spelling."""
    parameters = _object(values, "rope_parameters")
    local = {}
    if FULL in parameters or SLIDING in parameters:  # one set for each kind of layer
        if "local_rope_theta" not in family.options or set(parameters) - {FULL, SLIDING}:
            raise fail("rope_parameters", "one set for all layers of this family", repr(parameters))
        local = _object(parameters, SLIDING)
        if _scaling("rope_parameters", local) is not None:
            raise fail("rope_parameters", "no scaling on layers with a window", repr(local))
        parameters = _object(parameters, FULL)
    default = family.defaults.get("rope_theta", 10000.0)
    theta = _given(values, "rope_theta", _given(parameters, "rope_theta", default))
    positive("rope_theta", theta)
    scaling = _scaling("rope_scaling", _object(values, "rope_scaling")) or _scaling("rope_parameters", parameters)
    found: dict[str, Any] = {"rope_theta": float(theta), "rope_scaling": scaling}
    return found | ({"local_rope_theta": local["rope_theta"]} if "rope_theta" in local else {})


def _object(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    parameters = values.get(key) or {}
    if not isinstance(parameters, dict):
        raise fail(key, "an object or null", repr(parameters))
    return parameters


def _scaling(key: str, parameters: Mapping[str, Any]) -> RopeScaling | None:
    """The scaling that an object of rotary parameters asks for."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    own = {"default": (), LINEAR: ("factor",), LLAMA3: LLAMA3_KEYS}.get(kind) if isinstance(kind, str) else None
    if own is None:
        raise fail(key, "rope_type 'default', 'linear' or 'llama3'", repr(parameters))
    spare = set(parameters) - {"rope_type", "type", "rope_theta", *own}
    missing = [name for name in own if name not in parameters]
    if spare - {"partial_rotary_factor"} or missing or parameters.get("partial_rotary_factor", 1) != 1:
        raise fail(key, f"rope_type {kind!r} with {', '.join(own) or 'no other parameters'}", repr(parameters))
    return RopeScaling(kind, **{name: parameters[name] for name in own}) if own else None


def _scaling_document(scaling: RopeScaling) -> dict[str, Any]:
    keys = LLAMA3_KEYS if scaling.kind == LLAMA3 else ("factor",)
    return {"rope_type": scaling.kind, **{key: getattr(scaling, key) for key in keys}}


def _windows(values: Mapping[str, Any], family: Family, layers: int) -> tuple[int | None, tuple[int, ...]]:
    """W, and the layers without a window where only some have it."""
    window = values.get("sliding_window", family.defaults.get("sliding_window"))
    if values.get("sliding_window_size", window) != window:
        raise fail("sliding_window_size", f"sliding_window = {window}", values["sliding_window_size"])
    if family.window_switch and not flag("use_sliding_window", values.get("use_sliding_window", False)):
        window = None
    if window is not None:
        if "sliding_window" not in family.options:
            raise fail("sliding_window", f"None for {family.architecture}", window)
        at_least("sliding_window", window, 1)
    kinds = values.get("layer_types") or _usual_kinds(values, family, layers, window)
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (FULL, SLIDING) for kind in kinds):
        raise fail("layer_types", f"{layers} times {FULL!r} or {SLIDING!r}", values["layer_types"])
    full = tuple(layer for layer, kind in enumerate(kinds) if kind == FULL)
    if window is None and len(full) < layers:
        raise fail("layer_types", f"{FULL!r} on every layer without a sliding_window", kinds)
    if len(full) == layers:
        return None, ()
    if full and "full_layers" not in family.options:
        raise fail("layer_types", f"{SLIDING!r} on every layer of {family.architecture}", kinds)
    return window, full


def _usual_kinds(values: Mapping[str, Any], family: Family, layers: int, window: int | None) -> list[str]:
    """The layers' kinds where `config.json` does not list them."""
    if window is None:
        return [FULL] * layers
    first = 0
    if family.window_switch:
        first = at_least("max_window_layers", values.get("max_window_layers", 28), 0)
    every = family.full_every
    if every is not None:
        every = at_least("sliding_window_pattern", _given(values, "sliding_window_pattern", every), 1)
    is_full = (layer < first or (every is not None and (layer + 1) % every == 0) for layer in range(layers))
    return [FULL if full else SLIDING for full in is_full]
