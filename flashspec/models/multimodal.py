"""Checkpoints of models that also read images: the text model in them, which is all that the decoder computes.

Their `config.json` holds the text model's own in `text_config`, and their tensors have a prefix. The vision tower and
what joins it to the text are left out: without images, nothing of them enters a forward pass.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flashspec.checks import fail

# About images, or about training: no bearing on the logits of text.
INERT = """architectures model_type vision_config boi_token_index eoi_token_index image_token_index mm_tokens_per_image
initializer_range torch_dtype dtype transformers_version pad_token_id use_cache"""
# Said of the whole model where it is not said of the text, or said of both alike.
SHARED = ("tie_word_embeddings", "bos_token_id", "eos_token_id")


@dataclasses.dataclass(frozen=True)
class Multimodal:
    """One architecture that holds a text model.

    Attributes:
      model_type: in `config.json`.
      text_architecture: of the text model alone.
      text_type: its `model_type`.
      defaults: what `text_config` may leave out, beyond what the text model's own `config.json` may.
      uncapped: whether the logits are never soft-capped, so that a cap in `text_config` would be another model's.
      prefixes: of the text model's tensors, and what takes their place.
      towers: how the names of the other tensors begin.
    """

    model_type: str
    text_architecture: str
    text_type: str
    defaults: Mapping[str, Any]
    uncapped: bool
    prefixes: Mapping[str, str]
    towers: tuple[str, ...]


ARCHITECTURES: dict[str, Multimodal] = {
    "Gemma3ForConditionalGeneration": Multimodal(
        model_type="gemma3",
        text_architecture="Gemma3ForCausalLM",
        text_type="gemma3_text",
        defaults={
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
        uncapped=True,
        # As the models' authors publish them, and as they are called inside of Hugging Face's library.
        prefixes={"language_model.": "", "model.language_model.": "model."},
        towers=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    )
}


def find(values: Mapping[str, Any]) -> Multimodal | None:
    """The architecture that a parsed `config.json` names, if it is one of these."""
    architectures = values.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        return None
    return ARCHITECTURES.get(architectures[0]) if isinstance(architectures[0], str) else None


def text_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `config.json` of the text model alone; that of any other model as it is.

    Raises:
      ValueError: a key that may change the result, or two parts that disagree; named.
    """
    whole = find(values)
    if whole is None:
        return values
    if values.get("model_type", whole.model_type) != whole.model_type:
        raise fail("model_type", repr(whole.model_type), repr(values["model_type"]))
    text = values.get("text_config")
    if not isinstance(text, dict):
        raise fail("text_config", "the text model's configuration, an object", repr(text))
    if text.get("model_type", whole.text_type) != whole.text_type:
        raise fail("text_config.model_type", repr(whole.text_type), repr(text["model_type"]))
    known = {*INERT.split(), *SHARED, "text_config"}
    for key, value in values.items():
        if key not in known and not key.startswith("_"):
            raise fail(key, "no option that this decoder does not know (it may change the result)", repr(value))
    if whole.uncapped and text.get("final_logit_softcapping") is not None:
        cap = text["final_logit_softcapping"]
        raise fail("final_logit_softcapping", "null: the logits of this architecture are never capped", repr(cap))
    if values.get("tie_word_embeddings") not in (None, text.get("tie_word_embeddings", True)):
        raise fail("tie_word_embeddings", "the text_config's", repr(values["tie_word_embeddings"]))
    found = {**whole.defaults, **{key: value for key, value in text.items() if value is not None}}
    found |= {key: values[key] for key in SHARED if values.get(key) is not None}
    return found | {"architectures": [whole.text_architecture], "model_type": whole.text_type}


def text_tensors[T](values: Mapping[str, Any], stored: dict[str, T]) -> tuple[dict[str, T], tuple[str, ...]]:
    """The text model's tensors under its own names, and the names of those that are left out.

    Args:
      values: the parsed `config.json`.
      stored: every tensor of the checkpoint by name.

    Returns:
      (tensors, left out); for a model without a vision tower all of them, and none.
    """
    whole = find(values)
    if whole is None:
        return stored, ()
    left_out = tuple(name for name in stored if name.startswith(whole.towers))
    renamed = {}
    for name in stored.keys() - set(left_out):
        prefix = next((prefix for prefix in whole.prefixes if name.startswith(prefix)), None)
        renamed[name if prefix is None else whole.prefixes[prefix] + name.removeprefix(prefix)] = stored[name]
    return renamed, left_out
