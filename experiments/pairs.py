"""A target and what drafts for it: the pair that ships with the repository, or the user's own."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from flashspec import models
from flashspec.checks import fail
from flashspec.language_model import LanguageModel, Params
from flashspec.speculative import ModelDrafter, NgramDrafter, ShallowDrafter

FOLDER = Path(__file__).parent / "pair"
NGRAM = "ngram"
LAYERS = "layers:"


@dataclasses.dataclass(frozen=True)
class Pair:
    """Models on the device, and the tokenizer that both were trained with.

    Attributes:
      config: the target's shape.
      target, target_params: the model whose distribution is kept.
      drafter: what proposes.
      tokenizer: text <-> ids.
      dtype: of parameters and caches.
    """

    config: models.DecoderConfig
    target: LanguageModel
    target_params: Params
    drafter: Any
    tokenizer: models.Tokenizer
    dtype: Any

    def draft_forwards(self, draft_length: int) -> int:
        """Forwards of a draft model in a round: D + 1, or none without a model."""
        return draft_length + 1 if isinstance(self.drafter, ModelDrafter) else 0


def load_pair(
    target: Path | None = None, draft: str | None = None, dtype: Any = jnp.float32, *, layers: int | None = None
) -> Pair:
    """Load a target and its drafter.

    Args:
      target: a checkpoint directory; None for the bundled pair's.
      draft: a checkpoint directory, "ngram" for lookup in the row's own tokens, or "layers:L" for the target's own
        first L layers; None for the bundled pair's draft.
      dtype: of the parameters and caches.
      layers: make a smaller target of the target's first layers; None for all of them.

    Returns:
      The pair.

    Raises:
      ValueError: no such directory, no tokenizer, tokenizers that differ, more layers than there are, or a target of
        one's own without a draft.
    """
    if target is not None and draft is None:
        raise fail("draft", "a checkpoint directory, 'ngram' or 'layers:L' for a target of your own", None)
    checkpoint = load_checkpoint("target", target or FOLDER / "target", dtype)
    if checkpoint.tokenizer is None:
        raise fail("target", "a directory with a tokenizer.json", target)
    config, params = checkpoint.config, checkpoint.params
    if layers is not None:
        config, params = models.shallow(config, params, min(layers, config.num_layers))
    drafter = make_drafter(draft or str(FOLDER / "draft"), checkpoint, dtype)
    model = models.as_language_model(config, dtype)
    return Pair(config, model, params, drafter, checkpoint.tokenizer, dtype)


def load_checkpoint(name: str, directory: Path, dtype: Any, **options: Any) -> models.Checkpoint:
    """Load a checkpoint; an error names the argument that asked for it. Options are those of `models.load`."""
    if not directory.is_dir():
        raise fail(name, "a checkpoint directory", directory)
    try:
        return models.load(directory, dtype, **options)
    except ValueError as error:
        raise ValueError(f"`{name}`: {error}") from error


def make_drafter(draft: str, target: models.Checkpoint, dtype: Any) -> Any:
    """What drafts for a target: a checkpoint directory, "ngram" or "layers:L", as for `load_pair`.

    Raises:
      ValueError: no such directory, tokenizers that differ, or more layers than there are.
    """
    if draft == NGRAM:
        return NgramDrafter()
    if draft.startswith(LAYERS):
        layers = draft.removeprefix(LAYERS)
        most = target.config.num_layers
        if not (layers.isdecimal() and 1 <= int(layers) <= most):
            raise fail("draft", f"'layers:L' with L in 1..{most}, the target's layers", repr(draft))
        config, params = models.shallow(target.config, target.params, int(layers))
        return ShallowDrafter(models.as_language_model(config, dtype), params)
    if not Path(draft).is_dir():
        raise fail("draft", "a checkpoint directory, 'ngram' or 'layers:L'", repr(draft))
    checkpoint = load_checkpoint("draft", Path(draft), dtype)
    if checkpoint.tokenizer is not None and target.tokenizer is not None:
        _check_same_tokens(draft, checkpoint.tokenizer, target.tokenizer)
    return ModelDrafter(models.as_language_model(checkpoint.config, dtype), checkpoint.params)


def _check_same_tokens(name: str, draft: models.Tokenizer, target: models.Tokenizer) -> None:
    """The shared ids must mean the same text, or the draft proposes noise."""
    ours, theirs = (tokenizer.backend.get_vocab(with_added_tokens=True) for tokenizer in (target, draft))
    differing = [token for token, index in theirs.items() if index < target.size and ours.get(token) != index]
    if differing:
        meaning = f"{len(differing)} ids of {name} that mean other text, such as {differing[0]!r}"
        raise fail("draft", "the target's tokenizer", meaning)


def bundled_prompts() -> list[str]:
    """Beginnings of files that were held out from training."""
    return [prompt["text"] for prompt in json.loads((FOLDER / "prompts.json").read_text(encoding="utf-8"))]
