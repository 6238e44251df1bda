"""Models that do all of their work and then follow laws that they are given, so that acceptance can be set."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx
from jax import Array

from experiments.pairs import Pair
from flashspec import models
from flashspec.language_model import Cache, LanguageModel, Params
from flashspec.sampling import SamplingParams
from flashspec.speculative import ModelDrafter

SAMPLING = SamplingParams(temperature=1.0, top_k=None, top_p=None)
SMOKE = {
    "target": models.DecoderConfig("qwen3", 512, 64, 128, 1, 4, 2, 16),
    "draft": models.DecoderConfig("qwen3", 512, 32, 64, 1, 2, 1, 16, tie_embeddings=True),
}


class Ruled(NamedTuple):
    """Parameters of a model with the logits [V] that take the place of its own."""

    params: Params
    logits: Array


@dataclasses.dataclass(frozen=True)
class RuledModel:
    """A model that does all of its work, and then follows a law that it is given."""

    model: LanguageModel

    def apply(self, ruled: Ruled, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        logits, cache = self.model.apply(ruled.params, tokens, cache)
        return ruled.logits[None, None, :] + 1e-30 * logits, cache

    def prefill(self, ruled: Ruled, tokens: Array, num_valid: Array, cache: Cache) -> Cache:
        assert self.model.prefill is not None
        return self.model.prefill(ruled.params, tokens, num_valid, cache)

    def language_model(self) -> LanguageModel:
        """As generation sees it."""
        model = self.model
        return LanguageModel(self.apply, model.init_cache, model.vocab_size, self.prefill, model.rollback)


def draft_logits(vocab_size: int, acceptance: float) -> Array:
    """A uniform law over a share of the ids: against a uniform target it is accepted with that probability (33.11)."""
    kept = jnp.arange(vocab_size) < round(acceptance * vocab_size)
    return jnp.where(kept, 0.0, -1e9).astype(jnp.float32)


def ruled_pair(
    configs: Mapping[str, models.DecoderConfig],
    params: Mapping[str, Params],
    acceptance: float,
    decode_block: str | None = None,
) -> Pair:
    """A pair in bfloat16 of which each draft token is accepted with a given probability.

    Args:
      configs, params: of "target" and "draft".
      acceptance: between 0 and 1.
      decode_block: as in `models.as_language_model`, of both.
    """
    ruled = {
        role: RuledModel(models.as_language_model(config, jnp.bfloat16, decode_block=decode_block)).language_model()
        for role, config in configs.items()
    }
    vocab_size = configs["target"].vocab_size
    target = Ruled(params["target"], jnp.zeros(vocab_size, jnp.float32))
    drafter = ModelDrafter(ruled["draft"], Ruled(params["draft"], draft_logits(vocab_size, acceptance)))
    return Pair(configs["target"], ruled["target"], target, drafter, no_words(), jnp.bfloat16)


def drafter_of(pair: Pair, acceptance: float) -> ModelDrafter:
    """The drafter of a ruled pair with another acceptance: the same program, another operand."""
    drafter: Any = pair.drafter
    return ModelDrafter(drafter.model, drafter.params._replace(logits=draft_logits(pair.config.vocab_size, acceptance)))


def accepted_as_set(accepted: int, tested: int, acceptance: float) -> bool:
    """Whether drafts were accepted with the probability that was set, to four standard deviations."""
    return abs(accepted / tested - acceptance) < 4 * (acceptance * (1 - acceptance) / tested) ** 0.5


def abstract(config: models.DecoderConfig) -> Any:
    """The shapes of a decoder's parameters."""
    return nnx.state(nnx.eval_shape(lambda: models.Decoder(config, rngs=nnx.Rngs(0))), nnx.Param)


def random_params(config: models.DecoderConfig, seed: int) -> Params:
    """Random bfloat16 parameters, made on the device leaf by leaf."""
    shapes = abstract(config)
    keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(shapes))))
    return jax.tree.map(lambda leaf: _random_leaf(next(keys), leaf.shape), shapes)


def _random_leaf(key: Array, shape: tuple[int, ...]) -> Array:
    """A norm's scale of ones, or a matrix of standard deviation 1 / sqrt(inputs)."""
    if len(shape) == 1:
        return jnp.ones(shape, jnp.bfloat16)
    return _normal(key, shape) * np.asarray(shape[0] ** -0.5, jnp.bfloat16)


_normal = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1)


def no_words() -> models.Tokenizer:
    """For models that nobody reads."""
    return models.Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()))
