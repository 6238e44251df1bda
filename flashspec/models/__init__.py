"""Flax decoder-only transformers: their shapes, their weights, and their place in the generation loop."""

from flashspec.models.checkpoint import Checkpoint, load, save
from flashspec.models.config import FAMILIES, PRESETS, DecoderConfig
from flashspec.models.decoder import Decoder, merge
from flashspec.models.language_model import as_language_model, shallow
from flashspec.models.tokenizer import Tokenizer

__all__ = [
    "FAMILIES",
    "PRESETS",
    "Checkpoint",
    "Decoder",
    "DecoderConfig",
    "Tokenizer",
    "as_language_model",
    "load",
    "merge",
    "save",
    "shallow",
]
