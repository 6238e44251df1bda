"""What a server under load is asked: the pair that answers, and requests of ragged lengths with their own settings."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.pairs import Pair, bundled_prompts, load_pair
from experiments.request_queue import Request
from experiments.ruled_models import SMOKE, abstract, no_words, random_params, ruled_pair
from flashspec import models
from flashspec.language_model import LanguageModel, Params
from flashspec.sampling import SamplingParams
from flashspec.speculative import ModelDrafter

SHORTEST = 8
# One after another, request by request: no two neighbours sample alike.
SETTINGS = (
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_p=0.95),
    SamplingParams(temperature=0.8, top_k=50, min_p=0.02),
)
# Of a uniform law, which no temperature changes: acceptance stays what it was set to.
UNIFORM_SETTINGS = (SamplingParams(temperature=0.8), SamplingParams(temperature=1.0), SamplingParams(temperature=1.3))


@dataclasses.dataclass(frozen=True)
class Workload:
    """A pair and what it is asked.

    Attributes:
      pair: the models.
      prompts: ids of texts, of which requests take beginnings.
      settings: of sampling, given to requests in turn.
      longest: tokens of the longest prompt.
      new_tokens: the largest budget; budgets are drawn from a quarter of it up.
    """

    pair: Pair
    prompts: Sequence[np.ndarray]
    settings: Sequence[SamplingParams]
    longest: int
    new_tokens: int

    @property
    def filtered(self) -> bool:
        """Whether some request has a top-k or a top-p."""
        return any(one.top_k or one.top_p != 1 for one in self.settings)

    def requests(self, count: int, seed: int, rate: float | None = None) -> list[Request]:
        """Requests in order of arrival.

        Args:
          count: how many.
          seed: of lengths and arrivals; requests of one seed differ in nothing but their arrivals.
          rate: arrivals a second, with exponential gaps (a Poisson process); None for all of them at once.

        Returns:
          The requests, numbered from 0.
        """
        shapes, gaps = np.random.default_rng(seed), np.random.default_rng((seed, 1))
        arrivals = np.zeros(count) if rate is None else np.cumsum(gaps.exponential(1 / rate, count))
        made = []
        for number in range(count):
            prompt = self.prompts[number % len(self.prompts)]
            length = int(shapes.integers(min(SHORTEST, len(prompt)), min(self.longest, len(prompt)) + 1))
            budget = int(shapes.integers(max(self.new_tokens // 4, 1), self.new_tokens + 1))
            sampling = self.settings[number % len(self.settings)]
            made.append(Request(float(arrivals[number]), prompt[:length], budget, sampling, number))
        return made


def bundled(dtype: Any, longest: int, new_tokens: int) -> Workload:
    """The pair that ships here, and its prompts."""
    pair = load_pair(dtype=dtype)
    tokens, lengths = pair.tokenizer.encode(bundled_prompts())
    return Workload(pair, [row[:n] for row, n in zip(tokens, lengths, strict=True)], SETTINGS, longest, new_tokens)


def tiny(seed: int, longest: int, new_tokens: int) -> Workload:
    """Two random models of one layer, in float32."""
    rng = np.random.default_rng(seed)

    def made(config: models.DecoderConfig) -> tuple[LanguageModel, Params]:
        values = lambda leaf: jnp.asarray(rng.normal(0, leaf.shape[0] ** -0.5, leaf.shape), jnp.float32)  # noqa: E731
        return models.as_language_model(config), jax.tree.map(values, abstract(config))

    config = SMOKE["target"]
    pair = Pair(config, *made(config), ModelDrafter(*made(SMOKE["draft"])), no_words(), jnp.float32)
    return Workload(pair, random_prompts(config, seed, longest), SETTINGS, longest, new_tokens)


def large(target: str, draft: str, acceptance: float, seed: int, longest: int, new_tokens: int) -> Workload:
    """Two presets' shapes with random bfloat16 weights, which work in full and then follow laws of that acceptance."""
    names = {"target": target, "draft": draft}
    configs = {role: dataclasses.replace(models.PRESETS[name], eos_token_ids=()) for role, name in names.items()}
    params = {role: random_params(config, seed) for role, config in configs.items()}
    pair = ruled_pair(configs, params, acceptance)
    return Workload(pair, random_prompts(configs["target"], seed, longest), UNIFORM_SETTINGS, longest, new_tokens)


def random_prompts(config: models.DecoderConfig, seed: int, longest: int) -> list[np.ndarray]:
    """As many prompts of the full length as there are bundled ones."""
    return list(np.random.default_rng(seed).integers(0, config.vocab_size, (8, longest)).astype(np.int32))
