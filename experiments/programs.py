"""Plain and speculative decoding as programs compiled ahead of time, and their times over a set of prompts."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.pairs import Pair
from flashspec.generate import generate
from flashspec.measure import HOST, Call, Checked, Interleaved, compile_call, interleaved
from flashspec.recording import loop_compiler_options
from flashspec.sampling import SamplingParams
from flashspec.speculative import Totals

FIRST = ", to the first token"


class Prompts(NamedTuple):
    """Encoded prompts: tokens [B, P], lengths [B]."""

    tokens: np.ndarray
    lengths: np.ndarray


def batches_of(prompts: Prompts, batch: int) -> list[Prompts]:
    """Prompts in batches of one size; the last is filled up with the first prompts."""
    count = len(prompts.lengths)
    rows = np.arange(-(-count // batch) * batch) % count
    return [Prompts(prompts.tokens[part], prompts.lengths[part]) for part in rows.reshape(-1, batch)]


class Outcome(NamedTuple):
    """What is kept of a generation: its tokens [B, L], lengths [B] and totals, but no cache to continue from."""

    tokens: Array
    lengths: Array
    info: Totals


class Program:
    """One way of decoding, compiled once for the shape of the prompts; sampling and stop tokens are operands.

    The program around `generate` is ours, so that its loop is recorded here, as `generate` does it by itself.
    """

    def __init__(
        self, pair: Pair, draft_length: int, rule: str, max_new_tokens: int, example: Prompts, sampling: SamplingParams
    ) -> None:
        self.pair, self.constants = pair, (pair.target_params, pair.drafter if draft_length else None)

        def decode(key: Array, constants: Any, prompts: Prompts, sampling: SamplingParams, stops: Array) -> Outcome:
            params, drafter = constants
            generation = generate(
                key,
                pair.target,
                params,
                *prompts,
                drafter=drafter,
                draft_length=max(draft_length, 1),
                rule="chain" if drafter is None else rule,
                sampling=sampling,
                stop_tokens=stops,
                max_new_tokens=max_new_tokens,
            )
            return Outcome(generation.tokens, generation.lengths, generation.info)

        operands = (jax.random.key(0), self.constants, example, _arrays(sampling), self._stops(False))
        self.call: Call = compile_call(decode, *operands, compiler_options=loop_compiler_options())

    @property
    def compile_s(self) -> float:
        """Seconds of tracing, lowering and compiling."""
        return self.call.compile_s

    def run(
        self, batches: Sequence[Prompts], sampling: SamplingParams, seed: int, *, first_only: bool = False
    ) -> list[Outcome]:
        """Decode every batch, one dispatch each, waiting for each as a user would.

        Args:
          batches: prompts of the compiled shape.
          sampling: of the target and the draft.
          seed: of the draws.
          first_only: let every token stop its row, so that the same program ends with the first one.
        """
        key, sampling, stops = jax.random.key(seed), _arrays(sampling), self._stops(first_only)
        return [
            jax.block_until_ready(
                self.call.executable(jax.random.fold_in(key, i), self.constants, prompts, sampling, stops)
            )
            for i, prompts in enumerate(batches)
        ]

    def _stops(self, every_token: bool) -> Array:
        """[V] ids of stop tokens, the last repeated; without any, an id that no token has."""
        vocab_size, ids = self.pair.target.vocab_size, self.pair.config.eos_token_ids
        stops = list(range(vocab_size)) if every_token else list(ids) or [vocab_size]
        return jnp.asarray(stops + stops[-1:] * (vocab_size - len(stops)), jnp.int32)


def _arrays(sampling: SamplingParams) -> SamplingParams:
    return jax.tree.map(jnp.asarray, sampling)


class Programs(NamedTuple):
    """Plain and speculative decoding of the same prompts."""

    plain: Program
    speculative: Program


def program_builders(
    pair: Pair, lengths: Iterable[int], example: Prompts, sampling: SamplingParams, rule: str, max_new_tokens: int
) -> dict[int, Callable[[], Program]]:
    """What compiles decoding with so many drafts a round, by their number; 0 is plain decoding."""
    return {
        length: functools.partial(Program, pair, length, rule, max_new_tokens, example, sampling) for length in lengths
    }


def compile_programs(
    pair: Pair, batches: Sequence[Prompts], sampling: SamplingParams, draft_length: int, rule: str, max_new_tokens: int
) -> Programs:
    """Compile both programs for the shape of the batches, one after the other: each is asked how long that took."""
    builders = program_builders(pair, (0, draft_length), batches[0], sampling, rule, max_new_tokens)
    return Programs(*(build() for build in builders.values()))


@dataclasses.dataclass(frozen=True)
class Speed:
    """One way of decoding over all batches; ratios of sums, never means of ratios.

    Attributes:
      ttft_s: mean time to first token, by the program stopped there; prefill included, the draft's too.
      tpot_s: time per later token, sum(total - first) / sum(n - 1), n the tokens of a batch's longest row; None where
        it cannot be told.
      tokens_per_s: all tokens over all time.
      compile_s: of the program.
      first_call_s: the first pass over all batches after compilation.
    """

    ttft_s: float
    tpot_s: float | None
    tokens_per_s: float
    compile_s: float
    first_call_s: float


class Timings(NamedTuple):
    """Both speeds, and what speculative decoding generated."""

    plain: Speed
    speculative: Speed
    outcomes: list[Outcome]
    interleaved: Interleaved


def later_token_seconds(total: float, first: float, later: int) -> float | None:
    """(total - first) / later; None without later tokens, and where the noise of few short calls hides them."""
    return (total - first) / later if later and total > first else None


def later_tokens_per_round(info: Totals) -> float | None:
    """(emitted - 1) / (rounds - 1) of one row: times `Speed.tpot_s` it is the time of a round.

    The time to the first token holds one whole round, and of its tokens only the first. So the time that is left is of
    rounds - 1 rounds, and `Speed.tpot_s` divides it by emitted - 1 tokens.

    Args:
      info: with counts [1].

    Returns:
      The tokens; None where one round was all.
    """
    emitted, rounds = (np.asarray(count).item() for count in (info.emitted, info.rounds))
    return (emitted - 1) / (rounds - 1) if rounds > 1 else None


def time_decoding(
    programs: Programs, batches: Sequence[Prompts], sampling: SamplingParams, seed: int, check: Checked, repeats: int
) -> Timings:
    """Time both programs, to the first token and to the end, in turn; refuses where `check` did not pass."""
    outcomes: dict[str, list[Outcome]] = {}

    def timed(name: str, first_only: bool) -> Callable[[], Any]:
        def call() -> list[Outcome]:
            done = programs._asdict()[name].run(batches, sampling, seed, first_only=first_only)
            return done if first_only else outcomes.setdefault(name, done)

        return call

    calls = {f"{name}{end}": timed(name, bool(end)) for name in programs._fields for end in ("", FIRST)}
    times = interleaved(calls, check=check, repeats=repeats, clock=HOST)

    def speed(name: str, program: Program) -> Speed:
        first, total = times.timings[name + FIRST].steady_s, times.timings[name].steady_s
        emitted = [np.asarray(outcome.info.emitted) for outcome in outcomes[name]]
        later = sum(int(rows.max()) - 1 for rows in emitted)
        return Speed(
            ttft_s=first / len(batches),
            tpot_s=later_token_seconds(total, first, later),
            tokens_per_s=float(sum(rows.sum() for rows in emitted)) / total,
            compile_s=program.compile_s,
            first_call_s=times.timings[name].first_call_s,
        )

    speeds = {name: speed(name, program) for name, program in programs._asdict().items()}
    return Timings(**speeds, outcomes=outcomes["speculative"], interleaved=times)
