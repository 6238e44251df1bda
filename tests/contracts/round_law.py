"""The exact law of what the decoding loop emits, computed through the compiled round itself.

A round is a deterministic function of its state and its uniforms, piecewise constant in the uniforms. The table models
used here have laws of few parts, so that every breakpoint lies on a coarse grid; a round run once for each cell of the
grid, all cells as rows of one batch, is integrated exactly. Rows that reach the same tokens *and hold the same in their
caches* are merged, and one of them stands for all: the next round replays its history of uniforms from the start. So
any cache can be used, also one whose rows share pages, and a cache that remembers too much is seen.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flashspec.sampling import SamplingParams
from flashspec.speculative import RUNNING, Draws, State, init_state, round_step
from tests.table_models import Rules, TableModel, exact_law, next_law

BATCH = 2048  # rows of one dispatch; a fixed number, so that a case compiles once

Law = dict[tuple[int, ...], float]


class Start(NamedTuple):
    """Where one row begins: its prompt and its own limits. Rows with different starts share a batch."""

    prompt: tuple[int, ...]
    rules: Rules


class Cells(NamedTuple):
    """Equal cells of each kind of uniform."""

    draft: int = 1
    accept: int = 1
    final: int = 1


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration of the loop; the rules of all starts must have the same stop tokens and the same processor.

    Attributes:
      target: the target.
      draft: the draft model, for checks of its cache; None for a drafter without one.
      drafter: what the loop is given; None for plain decoding.
      rule: "chain", "match" or "greedy".
      draft_length: D.
      cells: the grid on which the uniforms are integrated.
      starts: the rows.
      draft_rules: temperature and bias of the draft; the target's when None.
      processor: jax twin of the rules' processor.
    """

    target: TableModel
    draft: TableModel | None
    drafter: Any
    rule: str
    draft_length: int
    cells: Cells
    starts: Sequence[Start]
    draft_rules: Rules | None = None
    processor: Callable | None = None

    @property
    def drafts(self) -> int:
        return self.draft_length if self.drafter is not None else 0


class Path(NamedTuple):
    """A merged class of rows: which start, its probability, and the uniforms that lead one row there."""

    start: int
    weight: float
    history: tuple[int, ...]


def unit_grid(case: Case) -> np.ndarray:
    """Midpoints of all cells: [G, 2 D + 1], the columns draft, accept, final."""
    sizes = [case.cells.draft] * case.drafts + [case.cells.accept] * case.drafts + [case.cells.final]
    index = np.indices(sizes).reshape(len(sizes), -1).T
    return (index + 0.5) / np.array(sizes)


def as_draws(uniforms: np.ndarray) -> Draws:
    depth = uniforms.shape[1] // 2
    draft, accept, final = uniforms[:, :depth], uniforms[:, depth:-1], uniforms[:, -1]
    return Draws(*(jnp.asarray(part, jnp.float32) for part in (draft, accept, final)))


def sampling_of(rules: Sequence[Rules], vocab: int) -> SamplingParams:
    """One setting a row."""
    bias = [np.zeros(vocab) if each.bias is None else each.bias for each in rules]
    return SamplingParams(
        temperature=np.array([each.temperature for each in rules], np.float32), logit_bias=np.array(bias, np.float32)
    )


def initial_state(case: Case, starts: Sequence[Start]) -> State:
    """The state before the first round of rows that begin at `starts`."""
    rules = [start.rules for start in starts]
    longest = max(len(start.prompt) for start in case.starts)
    prompts = np.array([(*start.prompt, *[0] * (longest - len(start.prompt))) for start in starts], np.int32)
    lengths = np.array([len(start.prompt) for start in starts], np.int32)
    vocab = case.target.model.vocab_size
    state = init_state(
        jax.random.key(0), case.target.model, case.target.params, prompts, lengths,
        drafter=case.drafter, draft_length=case.draft_length, rule=case.rule, processor=case.processor,
        sampling=sampling_of(rules, vocab),
        draft_sampling=sampling_of(rules if case.draft_rules is None else [case.draft_rules] * len(rules), vocab),
        stop_tokens=rules[0].stop or (0,), min_new_tokens=np.array([each.min_new for each in rules], np.int32),
        max_new_tokens=max(start.rules.max_new for start in case.starts),
    )  # fmt: skip
    budgets = jnp.asarray(lengths + [each.max_new for each in rules], jnp.int32)
    # A program compiled for one stop token serves rows that have none.
    is_stop = state.settings.is_stop & bool(rules[0].stop)
    return dataclasses.replace(
        state, settings=dataclasses.replace(state.settings, max_lengths=budgets, is_stop=is_stop)
    )


@functools.cache
def compiled(step: Callable) -> Callable:
    # These programs run for milliseconds and compile for seconds: little is optimised.
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(lambda state, draws: step(state, draws=draws)[0], compiler_options=options)


def states_after(case: Case, paths: Sequence[Path], step: Callable) -> Iterator[tuple[np.ndarray, np.ndarray, State]]:
    """Every path taken one round further over the whole grid: (path index, grid index, state), BATCH rows at a time."""
    uniforms = unit_grid(case)
    path, cell = (a.ravel() for a in np.indices((len(paths), len(uniforms))))
    history = np.array([each.history for each in paths], int).reshape(len(paths), -1)
    for first in range(0, len(path), BATCH):
        # The last batch is filled up with rows that are not looked at.
        rows = np.resize(np.arange(first, min(first + BATCH, len(path))), BATCH)
        state = initial_state(case, [case.starts[paths[i].start] for i in path[rows]])
        for past in history.T:
            state = compiled(step)(state, as_draws(uniforms[past[path[rows]]]))
        state = compiled(step)(state, as_draws(uniforms[cell[rows]]))
        used = min(BATCH, len(path) - first)
        yield path[rows][:used], cell[rows][:used], state


def loop_laws(case: Case, step: Callable = round_step, check: Callable[..., None] | None = None) -> list[Law]:
    """The law of the new tokens of each start.

    Args:
      case: the configuration.
      step: the round, or a wrong one.
      check: called as check(case, starts, state, rows) on every batch after its round.
    """
    laws: list[Law] = [{} for _ in case.starts]
    paths = [Path(i, 1.0, ()) for i in range(len(case.starts))]
    cells = len(unit_grid(case))
    for _ in range(1 + max(start.rules.max_new for start in case.starts)):
        merged: dict[bytes, Path] = {}
        for path, cell, state in states_after(case, paths, step):
            if check is not None:
                check(case, [case.starts[paths[i].start] for i in path], state)
            lengths, tokens = np.asarray(state.lengths), np.asarray(state.tokens)
            running = np.asarray(state.finish_reason) == RUNNING
            start = np.array([each.start for each in paths])[path]
            weight = np.array([each.weight for each in paths])[path] / cells
            signature = np.concatenate(
                [part[: len(path)] for part in (lengths[:, None], tokens, *held(case, state))], 1
            )
            signature = np.concatenate([start[:, None], running[: len(path), None], signature], 1)
            classes, example, of_row = np.unique(signature, axis=0, return_index=True, return_inverse=True)
            mass = np.bincount(of_row.ravel(), weight)
            for one, row, probability in zip(classes, example, mass, strict=True):
                prompt = len(case.starts[start[row]].prompt)
                if running[row]:
                    known = merged.get(
                        one.tobytes(), Path(start[row], 0.0, (*paths[path[row]].history, int(cell[row])))
                    )
                    merged[one.tobytes()] = known._replace(weight=known.weight + probability)
                else:
                    new = tuple(tokens[row, prompt : lengths[row]].tolist())
                    laws[start[row]][new] = laws[start[row]].get(new, 0.0) + probability
        paths = list(merged.values())
        if not paths:
            return laws
    raise AssertionError("rows still run after as many rounds as there are tokens")


def held(case: Case, state: State) -> list[np.ndarray]:
    """What the caches of both models hold, [B, capacity] each."""
    parts = [case.target.held(state.target_cache)]
    return parts if case.draft is None else [*parts, case.draft.held(state.draft_cache)]


def assert_laws(case: Case, laws: Sequence[Law]) -> None:
    """Each start's law is the law of plain sampling from the target, exactly."""
    for start, law in zip(case.starts, laws, strict=True):
        exact = exact_law(case.target, start.prompt, start.rules)
        assert law.keys() == exact.keys(), start
        np.testing.assert_allclose(
            [law[new] for new in exact], list(exact.values()), rtol=0, atol=1e-9, err_msg=str(start)
        )


def check_caches(case: Case, starts: Sequence[Start], state: State) -> None:
    """Both caches hold all tokens but the last, or the last few of them, and nothing else."""
    tokens, lengths = np.asarray(state.tokens), np.asarray(state.lengths)
    for part in held(case, state):
        part = part[: len(starts)]
        if not part.shape[1]:
            continue
        width = max(part.shape[1], tokens.shape[1])
        confirmed = np.where(np.arange(tokens.shape[1]) < lengths[:, None] - 1, tokens, -1)[: len(starts)]
        wanted, got = (np.pad(a, ((0, 0), (0, width - a.shape[1])), constant_values=-1) for a in (confirmed, part))
        got = np.where((got == -1) & (np.arange(width) < (got != -1).argmax(1)[:, None]), wanted, got)
        np.testing.assert_array_equal(got, wanted)
    for cache in (state.target_cache, *([] if case.draft is None else [state.draft_cache])):
        np.testing.assert_array_equal(np.asarray(cache.length)[: len(starts)], lengths[: len(starts)] - 1)


def check_logprobs(case: Case, starts: Sequence[Start], state: State) -> None:
    """The log-probabilities of finished rows are the target's own; looked at in a few rows of the batch."""
    tokens, lengths, logprobs = (np.asarray(a) for a in (state.tokens, state.lengths, state.logprobs))
    for row in range(0, len(starts), max(len(starts) // 16, 1)):
        prompt, rules = starts[row]
        for i in range(len(prompt), lengths[row]):
            law = next_law(case.target, tokens[row, :i].tolist(), i - len(prompt), rules)
            np.testing.assert_allclose(np.exp(logprobs[row, i]), law[tokens[row, i]], rtol=1e-5)
