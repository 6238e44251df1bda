"""Flax decoder-only transformers: their shapes, their weights, and their place in the generation loop."""

from flashspec.models.checkpoint import Checkpoint, load, place, save
from flashspec.models.config import DecoderConfig
from flashspec.models.decoder import Decoder, merge
from flashspec.models.families import FAMILIES
from flashspec.models.language_model import as_language_model, plan_mlp, shallow
from flashspec.models.partition import decoder_mesh
from flashspec.models.presets import PRESETS
from flashspec.models.rotary import RopeScaling
from flashspec.models.tokenizer import Tokenizer

__all__ = [
    "FAMILIES",
    "PRESETS",
    "Checkpoint",
    "Decoder",
    "DecoderConfig",
    "RopeScaling",
    "Tokenizer",
    "as_language_model",
    "decoder_mesh",
    "load",
    "merge",
    "place",
    "plan_mlp",
    "save",
    "shallow",
]
