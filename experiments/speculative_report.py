"""What the main job reports: exactness, times, acceptance, the speed-up beside its prediction, the texts."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.greedy_check import Greedy
from experiments.harness import Job
from experiments.law_check import CONTROL_OVER_BOUND, Law
from experiments.pairs import Pair
from experiments.programs import Outcome, Prompts, Speed, Timings
from flashspec import costs
from flashspec.measure import HOST, AcceptanceStatistics, Checked, acceptance_statistics, checked
from flashspec.models import Tokenizer

TTFT_METHOD = "one-token program"


def write_exactness(job: Job, greedy: Greedy, laws: Sequence[Law]) -> Checked:
    """State both claims and the control's, and whether all hold."""
    worst = max(laws, key=lambda law: law.in_bounds)
    where = "nowhere" if greedy.first_mismatch is None else f"first at new token {greedy.first_mismatch}"
    holds = [
        job.claim(
            "greedy: every token that speculation emitted is the target's maximum to rounding (largest gap "
            f"{greedy.max_logit_diff:.2g}, tolerance {greedy.tolerance:.2g}; differs from plain decoding {where})",
            greedy.equal,
        ),
        job.claim(
            f"law: {sum(law.draws for law in laws):,} sampled tokens at {len(laws)} prefixes follow the target's "
            f"probabilities (total variation {worst.tv:.4f}, bound {worst.bound:.4f})",
            all(law.tv <= law.bound for law in laws),
        ),
        *claim_control(job, laws),
    ]
    job.report["exact"] = {
        "greedy_equal": greedy.equal,
        "first_mismatch": greedy.first_mismatch,
        "max_logit_diff": greedy.max_logit_diff,
        "law_tv": worst.tv,
        "law_bound": worst.bound,
        "control_tv": min((law.control_tv for law in laws if law.shows_control), default=None),
        "greedy": dataclasses.asdict(greedy),
        "laws": [dataclasses.asdict(law) for law in laws],
    }
    return checked("greedy tokens are the target's maxima, and sampled tokens follow its law", lambda: all(holds))


def claim_control(job: Job, laws: Sequence[Law]) -> list[bool]:
    """State that the wrong rule is told apart where it must be, or why no prefix can tell it."""
    shown = [law.control_tv / law.bound for law in laws if law.shows_control]
    if shown:
        text = (
            f"control: a redraw from the target after a rejection is told apart at {len(shown)} of {len(laws)} "
            f"prefixes, at {min(shown):.1f} times the bound or more"
        )
        return [job.claim(text, min(shown) > CONTROL_OVER_BOUND)]
    if all(law.is_certain for law in laws):
        why = "one token is certain at every prefix, as at temperature 0: its draws were compared with that token"
    else:
        why = "at these prefixes a redraw from the target hardly changes the law"
    job.say(f"control: not applicable, {why}")
    return []


def acceptance_of(outcomes: Sequence[Outcome]) -> AcceptanceStatistics:
    """Acceptance by position over all rows of all batches."""
    accepted = np.concatenate([np.asarray(outcome.info.accepted) for outcome in outcomes])
    tested = np.concatenate([np.asarray(outcome.info.tested) for outcome in outcomes])
    return acceptance_statistics(accepted, tested)


def reached(acceptance: AcceptanceStatistics) -> list[float]:
    """Conditional acceptance by position; 0 where no round got that far."""
    return [0.0 if rate is None else rate for rate in acceptance.conditional]


def write(job: Job, pair: Pair, timings: Timings, parts: costs.RoundCosts, draft_length: int, check: Checked) -> None:
    """Times, acceptance, and the speed-up beside what eq. 33.15 says of the measured costs."""
    plain, speculative, outcomes = timings.plain, timings.speculative, timings.outcomes
    acceptance = acceptance_of(outcomes)
    emitted = sum(int(np.asarray(outcome.info.emitted).sum()) for outcome in outcomes)
    tokens_per_round = emitted / sum(int(np.asarray(outcome.info.rounds).sum()) for outcome in outcomes)
    forwards = pair.draft_forwards(draft_length)
    predicted = costs.estimate_round(reached(acceptance), draft_length, parts, draft_forwards=forwards)
    measured = plain.tpot_s / speculative.tpot_s if plain.tpot_s and speculative.tpot_s else None
    job.report |= {
        "plain": in_milliseconds(plain),
        "speculative": in_milliseconds(speculative),
        "draft_length": draft_length,
        "tokens_per_round": tokens_per_round,
        "acceptance_by_position": acceptance.conditional,
        "survival": acceptance.survival,
        "tested": acceptance.tested,
        "speedup": {"predicted": predicted.speedup, "measured": measured},
        "round_costs_s": dataclasses.asdict(parts),
        "ttft_method": TTFT_METHOD,
    }
    show_speed(job, np.dtype(pair.dtype).name, timings)
    if measured is not None:
        job.reaches(
            "speculative decoding",
            f"{measured:.2f} times plain decoding ({predicted.speedup:.2f} by eq. 33.15), "
            f"{tokens_per_round:.2f} tokens a round at D = {draft_length}, exact",
        )
        job.say(
            f"speed-up per later token: {measured:.2f} measured; {predicted.speedup:.2f} predicted by eq. 33.15 from "
            f"E[N] = {predicted.expected_tokens:.2f}, {forwards} draft forwards and a round of "
            f"{1e3 * predicted.round_time:.3g} ms, each part timed alone"
        )
    show_acceptance(job, acceptance, tokens_per_round)
    record(job, timings, draft_length, check)


def in_milliseconds(speed: Speed) -> dict[str, float | None]:
    """The times of one way of decoding as the report has them."""
    return {
        "ttft_ms": 1e3 * speed.ttft_s,
        "tpot_ms": None if speed.tpot_s is None else 1e3 * speed.tpot_s,
        "tokens_per_s": speed.tokens_per_s,
        "compile_s": speed.compile_s,
    }


def show_speed(job: Job, dtype: str, timings: Timings) -> None:
    """The table of times."""
    names = {
        "ttft_ms": "time to first token, ms (prefill of the models included)",
        "tpot_ms": "time per later token, ms",
        "tokens_per_s": "tokens per second",
        "compile_s": "compilation, s (in none of the times above)",
    }
    columns = in_milliseconds(timings.plain), in_milliseconds(timings.speculative)
    rows = [[text, *(column[name] for column in columns)] for name, text in names.items()]
    job.table("speed", f"{job.environment.device}, {dtype}, {HOST}", ["", "plain", "speculative"], rows)


def show_acceptance(job: Job, acceptance: AcceptanceStatistics, tokens_per_round: float) -> None:
    """Acceptance by position, with its counts, and its plot."""
    job.say(f"tokens per round: {tokens_per_round:.3f}")
    positions = list(range(1, len(acceptance.tested) + 1))
    counts, rates = (acceptance.tested, acceptance.accepted), (acceptance.conditional, acceptance.survival)
    rows = list(zip(positions, *counts, *rates, strict=True))
    job.table("acceptance", "Drafts by position", ["position", "tested", "accepted", "conditional", "survival"], rows)
    with job.figure("acceptance", "Acceptance of drafts by position") as axes:
        for rate, name in zip(rates, ("conditional on having been tested", "survival"), strict=True):
            axes.plot(positions, [np.nan if value is None else value for value in rate], "o-", label=name)
        axes.set(xlabel="draft position", ylabel="share", ylim=(0, 1), xticks=positions)
        axes.legend()


def record(job: Job, timings: Timings, draft_length: int, check: Checked) -> None:
    """One record for each way of decoding."""
    # Where the report lies is no setting: records of two runs are matched by their settings.
    options = {name: str(value) for name, value in vars(job.args).items() if name != "out"}
    for name, speed, drafts in (("plain", timings.plain, 0), ("speculative", timings.speculative, draft_length)):
        job.record(
            name,
            settings=options | {"draft_length": drafts},
            clock=HOST,
            compile_s=speed.compile_s,
            first_call_s=speed.first_call_s,
            steady_s=timings.interleaved.timings[name].steady_s,
            repeats=len(timings.interleaved.timings[name].seconds),
            ttft_s=speed.ttft_s,
            ttft_method=TTFT_METHOD,
            time_per_later_token_s=speed.tpot_s,
            check=check.what,
            values={"tokens_per_s": speed.tokens_per_s},
        )


def show_texts(
    job: Job, tokenizer: Tokenizer, texts: Sequence[str], batches: Sequence[Prompts], timings: Timings
) -> None:
    """What speculative decoding wrote after each prompt."""
    rows: list[tuple[Any, Any, Any]] = [
        row
        for batch, outcome in zip(batches, timings.outcomes, strict=True)
        for row in zip(np.asarray(outcome.tokens), np.asarray(batch.lengths), np.asarray(outcome.lengths), strict=True)
    ]
    for prompt, (tokens, start, end) in zip(texts, rows, strict=False):
        (text,) = tokenizer.decode(tokens[None, start:end])
        job.say(f"```text\n{prompt[-160:]}«{text}»\n```")
