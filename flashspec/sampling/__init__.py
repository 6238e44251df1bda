"""From logits to the distribution that is sampled from, and from it to a draw."""

from flashspec.sampling.distribution import FINE, NO_ADMISSIBLE, NONFINITE, nonfinite, probabilities
from flashspec.sampling.draws import draw, fold, inverse_cdf, row_keys, uniform
from flashspec.sampling.params import SamplingParams

__all__ = [
    "FINE",
    "NONFINITE",
    "NO_ADMISSIBLE",
    "SamplingParams",
    "draw",
    "fold",
    "inverse_cdf",
    "nonfinite",
    "probabilities",
    "row_keys",
    "uniform",
]
