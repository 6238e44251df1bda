"""Cost models of the chapter: pure arithmetic, no arrays and no clock.

Every function computes with the numbers that it is given: `fractions.Fraction` in, exact `Fraction` out; floats in,
floats out. `device_bound` holds the roofline of section 33.1, `latency` eq. 33.1, `amortisation` eq. 33.9,
`acceptance` eqs. 33.11 and 33.14, `speedup` eq. 33.15, `window` eq. 33.16.
"""

from flashspec.costs.acceptance import expected_acceptance, expected_tokens, survival
from flashspec.costs.amortisation import break_even_calls, net_benefit, pays_off
from flashspec.costs.device_bound import Rates, Roofline, roofline, sheet_bound_s, sourced_rates
from flashspec.costs.latency import amdahl_speedup, time_per_token
from flashspec.costs.speedup import (
    RoundCosts,
    RoundEstimate,
    best_draft_length,
    estimate_round,
    speculative_speedup,
)
from flashspec.costs.window import dropped_mass, window_error_bound

__all__ = [
    "Rates",
    "Roofline",
    "RoundCosts",
    "RoundEstimate",
    "amdahl_speedup",
    "best_draft_length",
    "break_even_calls",
    "dropped_mass",
    "estimate_round",
    "expected_acceptance",
    "expected_tokens",
    "net_benefit",
    "pays_off",
    "roofline",
    "sheet_bound_s",
    "sourced_rates",
    "speculative_speedup",
    "survival",
    "time_per_token",
    "window_error_bound",
]
