"""Generation: prefill and all rounds as one compiled program, or a stream of what each few rounds committed."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flashspec.checks import at_least, is_concrete
from flashspec.language_model import Cache, LanguageModel, Params
from flashspec.recording import loop_compiler_options
from flashspec.sampling import SamplingParams
from flashspec.selection import resolve_device
from flashspec.specialize import Ledger, ShapeBuckets, specialize
from flashspec.speculative.arguments import DEFAULT_SAMPLING, Call, check_continues, prepare
from flashspec.speculative.loop import run, split_caches, with_params, with_settings
from flashspec.speculative.start import begin, caches_serve, resume
from flashspec.speculative.state import RUNNING, Processor, State, Totals


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    Args:
      tokens: [B, P + max_new] int32; row b's new tokens start at prompt_lengths[b]; 0 past `lengths`.
      lengths: [B] int32, prompt and new tokens, a stop token included.
      finish_reason: [B] int32: LENGTH = 0 (the budget, or a cache without room), STOP = 1, NONFINITE = 2 (the target's
        logits hold NaN, +inf, or -inf only), NO_ADMISSIBLE = 3 (nothing may be sampled).
      logprobs: [B, max_new] float32, of each new token under the target's actual distribution; 0 past the end.
      info: sums over this call's rounds.
      state: to continue from.
    """

    tokens: Array
    lengths: Array
    finish_reason: Array
    logprobs: Array
    info: Totals
    state: State


class Chunk(NamedTuple):
    """What a few rounds committed.

    Args:
      tokens: [B, M] int32, each row's new tokens, then 0.
      logprobs: [B, M] float32, theirs, then 0.
      counts: [B] int32, how many there are.
      finish_reason: [B] int32, as in `Generation`; RUNNING = -1 for a row that goes on.
    """

    tokens: Array
    logprobs: Array
    counts: Array
    finish_reason: Array


def generate(
    key: Array,
    target: LanguageModel,
    target_params: Params,
    prompt_tokens: Any,
    prompt_lengths: Any,
    *,
    drafter: Any = None,
    draft_length: int = 4,
    rule: str = "chain",
    sampling: SamplingParams = DEFAULT_SAMPLING,
    draft_sampling: SamplingParams | None = None,
    processor: Processor | None = None,
    stop_tokens: Any = (),
    min_new_tokens: Any = 0,
    max_new_tokens: int = 128,
    state: State | None = None,
) -> Generation:
    """Sample continuations from the target's own distribution, plainly or by speculative decoding.

    Every emitted token has the law p( . | row so far) of the target under `sampling`, whatever the drafter (eq. 33.13,
    algorithm 33.2). One compiled program does prefill and all rounds, one dispatch a call. It is kept per target,
    drafter's structure, draft_length, rule, processor and shapes: new lengths, keys, sampling values and parameters do
    not compile again. A processor made anew for each call, such as a lambda, does. On a CUDA GPU its loop is recorded,
    but inside of your own `jax.jit` that is for you to ask (`loop_compiler_options`).

    Args:
      key: a scalar typed key, or keys [B], one per row; with its own key a row draws the same in any batch.
      target: the model whose distribution is kept.
      target_params: its parameters.
      prompt_tokens: [B, P] integers, an array or nested lists; what lies past the lengths is ignored.
      prompt_lengths: [B] integers in 1..P.
      drafter: what proposes tokens (`ModelDrafter`, `NgramDrafter`, `ShallowDrafter`, yours); None for plain decoding.
      draft_length: D, draft tokens in one round, at least 1.
      rule: "chain" accepts by probability ratios, "match" by equality with the target's own draws, "greedy" by equality
        with the target's most probable token, for temperature 0.
      sampling: what the target is sampled with.
      draft_sampling: what the drafter is sampled with; `sampling` when None. It changes the acceptance, not the law.
      processor: (logits [B, V], tokens [B, L], lengths [B]) -> logits [B, V], pure and the same function every call,
        applied at every draft and target position; tokens[b, : lengths[b]] is the prefix that logits[b] condition on.
      stop_tokens: ids, a sequence or an array; each ends its row at once, and is part of it.
      min_new_tokens: scalar or [B]; the first so many new tokens are no stop tokens.
      max_new_tokens: how many tokens a row may get.
      state: the `state` of an earlier result, whose rows begin with this prompt. They go on from their last token to
        prompt_lengths + max_new_tokens, under this call's settings: either pass the same prompt and more
        max_new_tokens, or the earlier tokens and lengths as the prompt. Its caches are taken over (donated). Where they
        do not serve they are filled anew, at the price of a prefill: other models, other arrays of parameters, caches
        that an earlier call took over, or too little room (`init_state` with more max_new_tokens makes room for
        several calls). Rows that ended other than by length stay ended.

    Returns:
      The generation.

    Raises:
      ValueError: an argument that does not fit, before any compute wherever it can be known by then.
      NotImplementedError: a key of another generator than threefry2x32.

    Source: chapter 33.5, 33.6; Leviathan, Kalman and Matias 2022.
    """
    call = prepare(
        key,
        target,
        target_params,
        prompt_tokens,
        prompt_lengths,
        drafter=drafter,
        draft_length=draft_length,
        rule=rule,
        sampling=sampling,
        draft_sampling=draft_sampling,
        processor=processor,
        stop_tokens=stop_tokens,
        min_new_tokens=min_new_tokens,
        max_new_tokens=max_new_tokens,
    )
    compiled = _compiled(tuple(_compiler_options(call).items()))
    generation = compiled(call, *_former(call, state))
    return dataclasses.replace(generation, state=with_params(generation.state, target_params, drafter))


def generate_stream(
    key: Array,
    target: LanguageModel,
    target_params: Params,
    prompt_tokens: Any,
    prompt_lengths: Any,
    *,
    rounds: int = 4,
    **options: Any,
) -> Iterator[Chunk]:
    """The tokens of `generate` as they come, one dispatch every few rounds.

    Args:
      key: as in `generate`.
      target: as in `generate`.
      target_params: as in `generate`.
      prompt_tokens: [B, P], as in `generate`.
      prompt_lengths: [B], as in `generate`.
      rounds: rounds between two yields; the host reads once per yield whether all rows are finished.
      **options: the other options of `generate`.

    Yields:
      What was committed since the last chunk; concatenated row by row, the new tokens of `generate` with the same
      arguments.

    Raises:
      ValueError: as in `generate`, when the first chunk is asked for.
      NotImplementedError: likewise.
    """
    at_least("rounds", rounds, 1)
    former = options.pop("state", None)
    call = prepare(key, target, target_params, prompt_tokens, prompt_lengths, **options)
    state, running = with_params(_open(call, *_former(call, former)), target_params, call.drafter), True
    while running:
        advanced, chunk = _advance(*split_caches(state), rounds)
        state = with_settings(advanced, state.settings)
        running = (jax.device_get(chunk.finish_reason) == RUNNING).any()
        yield chunk


def _former(call: Call, state: State | None) -> tuple[State | None, tuple[Cache, Cache] | None]:
    """The rows to continue, and their caches if these still serve."""
    if state is None:
        return None, None
    check_continues(call, state)
    rest, caches = split_caches(state)
    return with_settings(rest, None), caches if caches_serve(call, state) else None


def _first(call: Call, former: State | None, caches: tuple[Cache, Cache] | None) -> State:
    return begin(call) if former is None else resume(call, former, caches)


def _compiler_options(call: Call) -> dict[str, str]:
    """What generation is compiled with: nothing inside of a trace, since jax takes options at the top level alone.

    There `prepare` has put traced arrays into the call, even where all arguments were concrete.
    """
    arrays = [leaf for leaf in jax.tree.leaves(call) if isinstance(leaf, jax.Array)]
    if not all(map(is_concrete, arrays)):
        return {}
    placed = next((array for array in arrays if array.committed), None)
    return loop_compiler_options(resolve_device(None, placed).platform)


@functools.cache
def _compiled(options: tuple[tuple[str, str], ...]) -> Callable[..., Generation]:
    """`_generate` under compiler options; kept, and with it the programs that were compiled."""
    return jax.jit(_generate, donate_argnames="caches", compiler_options=dict(options))


def _generate(call: Call, former: State | None, caches: tuple[Cache, Cache] | None) -> Generation:
    state = run(_first(call, former, caches))
    columns = call.prompt_lengths[:, None] + jnp.arange(call.max_new_tokens, dtype=jnp.int32)[None, :]
    return Generation(
        tokens=state.tokens[:, : call.prompt_tokens.shape[1] + call.max_new_tokens],
        lengths=state.lengths,
        finish_reason=state.finish_reason,
        logprobs=jnp.take_along_axis(state.logprobs, columns, axis=1),
        info=state.totals,
        state=with_params(state, None, None),
    )


@functools.partial(jax.jit, donate_argnames="caches")
def _open(call: Call, former: State | None, caches: tuple[Cache, Cache] | None) -> State:
    return with_params(_first(call, former, caches), None, None)


@functools.partial(jax.jit, static_argnames="rounds", donate_argnames="caches")
def _advance(rest: State, caches: tuple[Cache, Cache], rounds: int) -> tuple[State, Chunk]:
    state = run(dataclasses.replace(rest, target_cache=caches[0], draft_cache=caches[1]), max_rounds=rounds)
    before = rest.lengths
    room, most = state.tokens.shape[1], rounds * (state.settings.draft_length + 1)
    columns = before[:, None] + jnp.arange(min(most, room), dtype=jnp.int32)[None, :]
    new, columns = columns < state.lengths[:, None], jnp.minimum(columns, room - 1)
    tokens, logprobs = (jnp.take_along_axis(array, columns, axis=1) for array in (state.tokens, state.logprobs))
    chunk = Chunk(
        tokens=jnp.where(new, tokens, 0),
        logprobs=jnp.where(new, logprobs, 0.0),
        counts=state.lengths - before,
        finish_reason=state.finish_reason,
    )
    return with_settings(state, None), chunk


class BucketedGenerate:
    """`generate` for prompts of any length, by one program for each bucket of prompt widths.

    A prompt [B, P] runs in the program of the smallest bound that is at least P, so that after `warm_up` no width
    compiles. Nothing of the padding is attended to: the caches hold each row's own length, and the result equals
    `generate` of the prompt padded to the bound, bit for bit.

    Args:
      buckets: of prompt widths P.
      **options: `background`, `max_executables` and `progress` of `flashspec.specialize.specialize`.

    Raises:
      ValueError: as `specialize`.
    """

    def __init__(self, buckets: ShapeBuckets | Iterable[int], **options: Any) -> None:
        axes = {"prompt_tokens": 1}
        self.programs = specialize(
            _generate_prompt,
            buckets,
            in_axes=axes,
            out_axes=None,
            length_arg="prompt_lengths",
            compiler_options=loop_compiler_options(),
            **options,
        )

    @property
    def ledger(self) -> Ledger:
        """What each bucket cost and saved."""
        return self.programs.ledger

    def __call__(
        self,
        key: Array,
        target: LanguageModel,
        target_params: Params,
        prompt_tokens: Any,
        prompt_lengths: Any,
        **options: Any,
    ) -> Generation:
        """`generate` with these arguments, all but `state`.

        Args:
          key: as in `generate`, like all that follow.
          target: the model whose distribution is kept.
          target_params: its parameters.
          prompt_tokens: [B, P] integers.
          prompt_lengths: [B] integers in 1..P.
          **options: the other options of `generate` without `state`.

        Returns:
          The generation; its `state` has the capacity of the bucket.

        Raises:
          ValueError: as `generate`; a prompt wider than the last bucket.
          NotImplementedError: as `generate`.
        """
        call, prompt = _split_prompt(prepare(key, target, target_params, prompt_tokens, prompt_lengths, **options))
        generation = self.programs(call, **prompt)
        width = prompt["prompt_tokens"].shape[1] + call.max_new_tokens
        return dataclasses.replace(
            generation,
            tokens=jax.device_put(np.asarray(generation.tokens)[:, :width]),
            state=with_params(generation.state, target_params, call.drafter),
        )

    def warm_up(self, *arguments: Any, bounds: Iterable[int] | None = None, **options: Any) -> Ledger:
        """Compile for chosen buckets, with a progress bar.

        Args:
          *arguments: of a call, with a prompt of any width; its batch counts.
          bounds: of the buckets; None for all.
          **options: of the call.

        Returns:
          The ledger.

        Raises:
          ValueError: as a call; a bound that no bucket has.
        """
        call, prompt = _split_prompt(prepare(*arguments, **options))
        return self.programs.warm_up(call, **prompt, bounds=bounds)


def _split_prompt(call: Call) -> tuple[Call, dict[str, Any]]:
    """A call without its prompt, and the prompt."""
    prompt = {name: getattr(call, name) for name in ("prompt_tokens", "prompt_lengths")}
    nothing: dict[str, Any] = dict.fromkeys(prompt)
    return dataclasses.replace(call, **nothing), prompt


def _generate_prompt(call: Call, prompt_tokens: Array, prompt_lengths: Array) -> Generation:
    whole = dataclasses.replace(call, prompt_tokens=prompt_tokens, prompt_lengths=prompt_lengths)
    return _compiled(())(whole, None, None)
