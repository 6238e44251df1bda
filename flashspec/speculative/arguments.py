"""The arguments of a call: checked before any compute, and put on the device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from flashspec.checks import at_least, fail, integer, is_concrete, one_of, shape
from flashspec.language_model import LanguageModel, Params
from flashspec.sampling import SamplingParams, row_keys
from flashspec.speculative.drafters import check_drafter
from flashspec.speculative.rounds import RULES
from flashspec.speculative.state import Processor, Settings, State

# Stop tokens are padded to a multiple of this many, so that another few of them do not make another program.
STOP_SLOTS = 8

DEFAULT_SAMPLING = SamplingParams()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Call:
    """The checked arguments of a call, on the device; the static fields select the compiled program."""

    target: LanguageModel = dataclasses.field(metadata={"static": True})
    rule: str = dataclasses.field(metadata={"static": True})
    draft_length: int = dataclasses.field(metadata={"static": True})
    processor: Processor | None = dataclasses.field(metadata={"static": True})
    max_new_tokens: int = dataclasses.field(metadata={"static": True})
    key: Array
    target_params: Params
    drafter: Any
    sampling: SamplingParams
    draft_sampling: SamplingParams
    stop_tokens: Array
    min_new_tokens: Array
    prompt_tokens: Array
    prompt_lengths: Array

    @property
    def capacity(self) -> int:
        """Positions that tokens and caches need: P + max_new_tokens + D."""
        return self.prompt_tokens.shape[1] + self.max_new_tokens + self.draft_length

    def settings(self) -> Settings:
        """What the rounds of this call hold fixed."""
        lengths = self.prompt_lengths
        is_stop = jnp.zeros(self.target.vocab_size, bool)
        return Settings(
            target=self.target,
            rule=self.rule,
            draft_length=self.draft_length,
            processor=self.processor,
            target_params=self.target_params,
            drafter=self.drafter,
            sampling=self.sampling,
            draft_sampling=self.draft_sampling,
            is_stop=is_stop.at[self.stop_tokens].set(True, mode="drop", wrap_negative_indices=False),
            prompt_lengths=lengths,
            min_lengths=lengths + self.min_new_tokens,
            max_lengths=lengths + self.max_new_tokens,
            keys=row_keys(self.key, lengths.shape[0]),
        )


def prepare(
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
) -> Call:
    """Check the arguments of a call (see `flashspec.generate.generate`) and put them on the device.

    Shapes and types are always checked, values where they can be read, that is outside of `jax.jit`.

    Raises:
      ValueError: an argument that does not fit, before any compute.
    """
    draft_sampling = sampling if draft_sampling is None else draft_sampling
    _check_static(target, drafter, draft_length, rule, processor, max_new_tokens)
    prompt_tokens = _as_array("prompt_tokens", prompt_tokens)
    prompt_lengths = _as_array("prompt_lengths", prompt_lengths)
    min_new_tokens = _as_array("min_new_tokens", min_new_tokens)
    sizes = shape("prompt_lengths", prompt_lengths, "B", shape("prompt_tokens", prompt_tokens, "B P"))
    integer("prompt_tokens", prompt_tokens)
    integer("prompt_lengths", prompt_lengths)
    _check_key(key, sizes["B"])
    for params in (sampling, draft_sampling):
        readable(params).check(sizes["B"], target.vocab_size)
    _check_prompt(readable(prompt_tokens), readable(prompt_lengths), target.vocab_size)
    _check_min_new_tokens(readable(min_new_tokens), sizes["B"], max_new_tokens)
    if rule == "greedy":
        _check_greedy(readable(sampling.temperature))
    return Call(
        target=target,
        rule=rule,
        draft_length=0 if drafter is None else draft_length,
        processor=processor,
        max_new_tokens=max_new_tokens,
        key=key,
        target_params=target_params,
        drafter=drafter,
        sampling=_sampling_on_device(sampling),
        draft_sampling=_sampling_on_device(draft_sampling),
        stop_tokens=on_device(_stop_slots(readable(stop_tokens), target.vocab_size), jnp.int32),
        min_new_tokens=on_device(min_new_tokens, jnp.int32),
        prompt_tokens=on_device(prompt_tokens, jnp.int32),
        prompt_lengths=on_device(prompt_lengths, jnp.int32),
    )


def check_continues(call: Call, state: State) -> None:
    """Check that `state` holds rows that begin with the call's prompt and fit its limits.

    Raises:
      ValueError: another batch, a prompt that is not how the state's row begins, or a row longer than the
        call allows.
    """
    batch = call.prompt_tokens.shape[0]
    if state.lengths.shape[0] != batch:
        raise fail("state", f"the prompt's batch of {batch}", state.lengths.shape[0])
    held = readable((call.prompt_tokens, call.prompt_lengths, state.tokens, state.lengths))
    if not all(is_concrete(array) for array in held):
        return
    prompt, prompt_lengths, tokens, lengths = held
    inside = np.arange(prompt.shape[1]) < prompt_lengths[:, None]
    if prompt_lengths.max() > tokens.shape[1] or (prompt_lengths > lengths).any():
        raise fail("prompt_lengths", "at most the lengths of the state's rows", prompt_lengths.tolist())
    width = min(prompt.shape[1], tokens.shape[1])
    if (inside[:, :width] & (prompt[:, :width] != tokens[:, :width])).any():
        raise fail("prompt_tokens", "how the state's rows begin", "other tokens")
    if (lengths > prompt_lengths + call.max_new_tokens).any():
        raise fail("max_new_tokens", "room for what the state's rows already hold", call.max_new_tokens)


def readable(tree: Any) -> Any:
    """The tree with every value that can be read now on the host; traced leaves stay as they are."""
    return jax.tree.map(lambda leaf: jax.device_get(leaf) if is_concrete(leaf) else leaf, tree)


def on_device(value: Any, dtype: DTypeLike) -> Array:
    """The value in this dtype, whatever it came in, so that no dtype makes another program; host values are put."""
    return value.astype(dtype) if isinstance(value, jax.Array) else jax.device_put(np.asarray(value).astype(dtype))


def _sampling_on_device(params: SamplingParams) -> SamplingParams:
    def given(value: Any, dtype: DTypeLike = jnp.float32) -> Array | None:
        return None if value is None else on_device(value, dtype)

    return SamplingParams(
        temperature=on_device(params.temperature, jnp.float32),
        top_k=given(params.top_k, jnp.int32),
        top_p=given(params.top_p),
        min_p=on_device(params.min_p, jnp.float32),
        logit_bias=given(params.logit_bias),
        allowed_tokens=given(params.allowed_tokens, jnp.bool_),
    )


def _as_array(name: str, value: Any) -> Any:
    """Nested lists and scalars as an array on the host; arrays as they are."""
    if hasattr(value, "dtype"):
        return value
    try:
        return np.asarray(value)
    except ValueError as ragged:
        raise fail(name, "an array, or nested lists with rows of one length", "rows of several lengths") from ragged


def _check_static(target: Any, drafter: Any, draft_length: int, rule: str, processor: Any, max_new_tokens: int) -> None:
    if not isinstance(target, LanguageModel):
        raise fail("target", "a LanguageModel", type(target).__name__)
    one_of("rule", rule, RULES)
    at_least("draft_length", draft_length, 1)
    at_least("max_new_tokens", max_new_tokens, 1)
    if drafter is not None:
        check_drafter(drafter, target)
    if processor is not None and not callable(processor):
        raise fail("processor", "a function or None", type(processor).__name__)


def _check_key(key: Any, batch: int) -> None:
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise fail("key", "a typed key, as from jax.random.key", getattr(key, "dtype", type(key).__name__))
    if key.shape not in ((), (batch,)):
        raise fail("key", f"a scalar key or one key a row, shape [{batch}]", f"shape {list(key.shape)}")


def _check_prompt(tokens: Any, lengths: Any, vocab_size: int) -> None:
    batch, size = np.shape(tokens)
    if not batch or not size:
        raise fail("prompt_tokens", "at least one row of at least one token", f"shape {[batch, size]}")
    if not is_concrete(lengths):
        return
    lengths = np.asarray(lengths)
    if lengths.min() < 1:
        raise fail("prompt_lengths", "at least one token in each prompt", lengths.tolist())
    if lengths.max() > size:
        raise fail("prompt_lengths", f"at most the {size} columns of `prompt_tokens`", lengths.tolist())
    if is_concrete(tokens):
        inside = np.asarray(tokens)[np.arange(size) < lengths[:, None]]
        if inside.min() < 0 or inside.max() >= vocab_size:
            raise fail("prompt_tokens", f"ids in 0..{vocab_size - 1}", f"{inside.min()}..{inside.max()}")


def _check_min_new_tokens(count: Any, batch: int, most: int) -> None:
    integer("min_new_tokens", count)
    if np.ndim(count):
        shape("min_new_tokens", count, "B", {"B": batch})
    if is_concrete(count) and not np.all((np.asarray(count) >= 0) & (np.asarray(count) <= most)):
        raise fail("min_new_tokens", f"counts in 0..max_new_tokens = {most}", count)


def _check_greedy(temperature: Any) -> None:
    if is_concrete(temperature) and np.any(np.asarray(temperature) != 0):
        raise fail("rule", "'chain' or 'match' where a temperature is above 0", "'greedy'")


def _stop_slots(stop_tokens: Any, vocab_size: int) -> Any:
    """Stop tokens as a padded array of ids; the padding is an id that no token has."""
    if not is_concrete(stop_tokens):
        return stop_tokens
    ids = np.atleast_1d(np.asarray(stop_tokens))
    if ids.size and (ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocab_size):
        raise fail("stop_tokens", f"ids in 0..{vocab_size - 1}", stop_tokens)
    slots = max(-(-ids.size // STOP_SLOTS), 1) * STOP_SLOTS
    return np.pad(ids.astype(np.int32), (0, slots - ids.size), constant_values=vocab_size)
