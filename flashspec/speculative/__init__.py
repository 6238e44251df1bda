"""Speculative decoding: three exact rules, three drafters, and the rounds that put them to work."""

from flashspec.speculative.accept import Verdict, verify_chain, verify_greedy, verify_match
from flashspec.speculative.drafters import Drafter, Law, ModelDrafter, NgramDrafter, Proposal, ShallowDrafter
from flashspec.speculative.formulas import (
    acceptance_probability,
    acceptance_rate,
    check_distributions,
    output_law,
    residual_distribution,
)
from flashspec.speculative.loop import run, speculative_trace
from flashspec.speculative.rounds import round_step
from flashspec.speculative.slots import admit, vacant
from flashspec.speculative.start import init_state
from flashspec.speculative.state import LENGTH, RUNNING, STOP, Draws, RoundInfo, Settings, State, Totals

__all__ = [
    "LENGTH",
    "RUNNING",
    "STOP",
    "Drafter",
    "Draws",
    "Law",
    "ModelDrafter",
    "NgramDrafter",
    "Proposal",
    "RoundInfo",
    "Settings",
    "ShallowDrafter",
    "State",
    "Totals",
    "Verdict",
    "acceptance_probability",
    "acceptance_rate",
    "admit",
    "check_distributions",
    "init_state",
    "output_law",
    "residual_distribution",
    "round_step",
    "run",
    "speculative_trace",
    "vacant",
    "verify_chain",
    "verify_greedy",
    "verify_match",
]
