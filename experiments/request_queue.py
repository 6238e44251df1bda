"""A queue of requests before a batch of slots: a slot that falls free is given to the next request that waits."""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from experiments.pairs import Pair
from flashspec import costs
from flashspec.language_model import Cache
from flashspec.sampling import SamplingParams, row_keys
from flashspec.speculative import RUNNING, STOP, State, admit, init_state, round_step, vacant
from flashspec.speculative.loop import split_caches, with_params, with_settings

LOOK = 4  # rounds between two looks at the queue while a slot is free
MOST_ROUNDS = 2**30


@dataclasses.dataclass(frozen=True)
class Request:
    """What one user asks for.

    Attributes:
      arrival_s: when it comes, seconds after the start.
      prompt: ids [P].
      new_tokens: how many it may get.
      sampling: scalars.
      number: its own; the draws of a request are those of its number, whatever slot it gets.
    """

    arrival_s: float
    prompt: np.ndarray
    new_tokens: int
    sampling: SamplingParams
    number: int


@dataclasses.dataclass(frozen=True)
class Served:
    """A request and what became of it; times in seconds after the start.

    Attributes:
      request: what was asked.
      tokens: ids [L], prompt and new tokens.
      stopped: a stop token ended it, not its budget.
      admitted_s: when it got its slot.
      finished_s: when its last token was there.
      rounds: that it took part in.
      accepted, tested: drafts by position, [D].
    """

    request: Request
    tokens: np.ndarray
    stopped: bool
    admitted_s: float
    finished_s: float
    rounds: int
    accepted: np.ndarray
    tested: np.ndarray

    @property
    def wait_s(self) -> float:
        """In the queue."""
        return self.admitted_s - self.request.arrival_s

    @property
    def request_s(self) -> float:
        """From arrival to the last token."""
        return self.finished_s - self.request.arrival_s

    @property
    def new_tokens(self) -> int:
        """How many it got."""
        return len(self.tokens) - len(self.request.prompt)


class Dispatch(NamedTuple):
    """One program's run: seconds, tokens that it committed (none for a prefill), and rows that took part."""

    seconds: float
    tokens: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a server did with a list of requests.

    Attributes:
      served: in the order in which they ended.
      dispatches: in order.
      span_s: from the first arrival to the last token.
    """

    served: tuple[Served, ...]
    dispatches: tuple[Dispatch, ...]
    span_s: float

    @property
    def s_per_token(self) -> float:
        """Seconds of all programs, prefills included, over all tokens: the ratio of sums of exercise 33.13."""
        return float(costs.time_per_token([d.seconds for d in self.dispatches], [d.tokens for d in self.dispatches]))

    @property
    def decode_s_per_token(self) -> float:
        """The same without prefills."""
        rounds = [dispatch for dispatch in self.dispatches if dispatch.tokens]
        return float(costs.time_per_token([d.seconds for d in rounds], [d.tokens for d in rounds]))

    @property
    def busy_share(self) -> float:
        """Share of the span in which the device had a program to run, by the host's clock."""
        return sum(dispatch.seconds for dispatch in self.dispatches) / self.span_s

    @property
    def mean_rows(self) -> float:
        """Rows that took part in rounds, averaged over the time of the rounds."""
        rounds = [dispatch for dispatch in self.dispatches if dispatch.tokens]
        return sum(d.seconds * d.rows for d in rounds) / sum(d.seconds for d in rounds)


class Clock:
    """Time since the start, in which waiting for the next arrival takes none of ours."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._start = now, now()

    def __call__(self) -> float:
        return self._now() - self._start

    def skip_to(self, moment: float) -> None:
        """Let the time until `moment` pass at once."""
        self._start -= max(moment - self(), 0.0)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is static about a server.

    Attributes:
      slots: rows of the batch, B.
      prompt: longest prompt, P.
      new_tokens: largest budget.
      draft_length: D; 0 for plain decoding.
      group: requests that one prefill takes at most, padding included.
      filtered: whether requests may set top-k and top-p.
    """

    slots: int
    prompt: int
    new_tokens: int
    draft_length: int
    group: int = 1
    filtered: bool = True


class Group(NamedTuple):
    """Requests for one prefill: a slot each, which for a filling-up is none of the batch's.

    Args:
      slots, lengths, budgets, numbers: [A] int32.
      prompts: [A, P] int32.
      sampling: settings [A].
    """

    slots: np.ndarray
    prompts: np.ndarray
    lengths: np.ndarray
    budgets: np.ndarray
    numbers: np.ndarray
    sampling: SamplingParams


type Batch = tuple[State, tuple[Cache, Cache]]  # a state without parameters and caches, and its caches


class Server:
    """One way of decoding, compiled for `Sizes`; `serve` takes requests in the order in which they come."""

    def __init__(self, pair: Pair, sizes: Sizes, seed: int) -> None:
        self.pair, self.sizes, self.key = pair, sizes, jax.random.key(seed)
        self.constants = (pair.target_params, pair.drafter if sizes.draft_length else None)
        self._empty = self._vacant()
        operands = (self.constants, *self._empty)
        self._admit = jax.jit(self._enter, donate_argnums=2).lower(*operands, self._group([])).compile()
        self._round = jax.jit(self._advance, donate_argnums=2).lower(*operands, np.int32(1)).compile()

    def serve(self, requests: Sequence[Request]) -> Trace:
        """Serve requests until the last one has its tokens.

        Args:
          requests: in order of arrival; each fits the sizes.

        Returns:
          What happened.
        """
        shift = _Shift(self, jax.tree.map(jnp.copy, self._empty), collections.deque(requests))
        while shift.goes_on():
            shift.step()
        return shift.trace()

    def admit(self, batch: Batch, taken: Sequence[tuple[int, Request]]) -> Batch:
        """Requests put into slots; the batch is used up."""
        return jax.block_until_ready(self._admit(self.constants, *batch, self._group(taken)))

    def rounds(self, batch: Batch, most: int) -> Batch:
        """Rounds until a row ends, `most` at most; the batch is used up."""
        return jax.block_until_ready(self._round(self.constants, *batch, np.int32(most)))

    def _options(self, sampling: SamplingParams) -> dict[str, Any]:
        sizes, config = self.sizes, self.pair.config
        return {
            "draft_length": max(sizes.draft_length, 1),
            "sampling": sampling,
            "stop_tokens": config.eos_token_ids,
        }

    def _vacant(self) -> Batch:
        """A batch in which nobody is."""
        slots, sizes = self.sizes.slots, self.sizes
        state = init_state(
            row_keys(self.key, slots),
            self.pair.target,
            self.constants[0],
            np.zeros((slots, 1), np.int32),
            np.ones(slots, np.int32),
            drafter=self.constants[1],
            max_new_tokens=sizes.prompt - 1 + sizes.new_tokens,
            **self._options(self._sampling([SamplingParams()] * slots)),
        )
        return split_caches(with_params(vacant(state), None, None))

    def _sampling(self, settings: Sequence[SamplingParams]) -> SamplingParams:
        """Settings of several requests, one value a row."""
        column = {
            field: np.array([getattr(one, field) for one in settings], dtype)
            for field, dtype in (("temperature", "f4"), ("top_k", "i4"), ("top_p", "f4"), ("min_p", "f4"))
        }
        return SamplingParams(**column if self.sizes.filtered else column | {"top_k": None, "top_p": None})

    def _group(self, taken: Sequence[tuple[int, Request]]) -> Group:
        """Requests as arrays, filled up with some that go into no slot."""
        size, nobody = self.sizes.group, Request(0.0, np.zeros(1, np.int32), 1, SamplingParams(), 0)
        rows = [*taken, *[(self.sizes.slots, nobody)] * (size - len(taken))]
        prompts = np.zeros((size, self.sizes.prompt), np.int32)
        for row, (_, request) in enumerate(rows):
            prompts[row, : len(request.prompt)] = request.prompt
        requests = [request for _, request in rows]
        return Group(
            slots=np.array([slot for slot, _ in rows], np.int32),
            prompts=prompts,
            lengths=np.array([len(request.prompt) for request in requests], np.int32),
            budgets=np.array([request.new_tokens for request in requests], np.int32),
            numbers=np.array([request.number for request in requests], np.int32),
            sampling=self._sampling([request.sampling for request in requests]),
        )

    def _whole(self, constants: Any, rest: State, caches: tuple[Cache, Cache]) -> State:
        return with_params(dataclasses.replace(rest, target_cache=caches[0], draft_cache=caches[1]), *constants)

    def _enter(self, constants: Any, rest: State, caches: tuple[Cache, Cache], group: Group) -> Batch:
        rows = init_state(
            jax.vmap(jax.random.fold_in, (None, 0))(self.key, group.numbers),
            self.pair.target,
            constants[0],
            group.prompts,
            group.lengths,
            drafter=constants[1],
            max_new_tokens=self.sizes.new_tokens,
            **self._options(group.sampling),
        )
        limits = dataclasses.replace(rows.settings, max_lengths=group.lengths + group.budgets)
        state = admit(self._whole(constants, rest, caches), group.slots, with_settings(rows, limits))
        return split_caches(with_params(state, None, None))

    def _advance(self, constants: Any, rest: State, caches: tuple[Cache, Cache], most: Array) -> Batch:
        """Rounds until one of the rows ends, so that its slot can be given away."""
        state = self._whole(constants, rest, caches)
        settings, running = state.settings, state.running

        def goes_on(carry: tuple[State, Array]) -> Array:
            return running.any() & (carry[0].running == running).all() & (carry[1] < most)

        def one(carry: tuple[State, Array]) -> tuple[State, Array]:
            after, _ = round_step(with_settings(carry[0], settings))
            return with_settings(after, None), carry[1] + 1

        after, _ = lax.while_loop(goes_on, one, (with_settings(state, None), jnp.zeros((), jnp.int32)))
        return split_caches(with_params(with_settings(after, settings), None, None))


class _Shift:
    """One list of requests being served: the batch, who is in which slot, and the time."""

    def __init__(self, server: Server, batch: Batch, coming: collections.deque[Request]) -> None:
        self.server, self.batch, self.coming, self.first_s = server, batch, coming, coming[0].arrival_s
        self.waiting: collections.deque[Request] = collections.deque()
        self.held: dict[int, tuple[Request, float]] = {}
        self.lengths = np.ones(server.sizes.slots, np.int64)
        self.dispatches: list[Dispatch] = []
        self.ended: list[tuple[Request, float, float, State, int]] = []
        self.clock = Clock()

    def goes_on(self) -> bool:
        """Whether a request has yet to come, waits, or is in a slot."""
        return bool(self.coming or self.waiting or self.held)

    def step(self) -> None:
        """Give away free slots; without any, or without requests for them, run rounds or wait for an arrival."""
        while self.coming and self.coming[0].arrival_s <= self.clock():
            self.waiting.append(self.coming.popleft())
        free = [slot for slot in range(self.server.sizes.slots) if slot not in self.held]
        if self.waiting and free:
            self._admit(free)
        elif self.held:
            self._rounds(LOOK if free and self.coming else MOST_ROUNDS)
        else:
            self.clock.skip_to(self.coming[0].arrival_s)

    def trace(self) -> Trace:
        """What happened, with the tokens read from the device."""
        served = tuple(_served(*each) for each in self.ended)
        return Trace(served, tuple(self.dispatches), max(one.finished_s for one in served) - self.first_s)

    def _admit(self, free: Sequence[int]) -> None:
        size = min(self.server.sizes.group, len(self.waiting), len(free))
        taken = [(slot, self.waiting.popleft()) for slot in free[:size]]
        start = self.clock()
        self.batch = self.server.admit(self.batch, taken)
        self.dispatches.append(Dispatch(self.clock() - start, 0, size))
        for slot, request in taken:
            self.held[slot], self.lengths[slot] = (request, start), len(request.prompt)

    def _rounds(self, most: int) -> None:
        start = self.clock()
        self.batch = self.server.rounds(self.batch, most)
        state = self.batch[0]
        lengths, reasons = jax.device_get((state.lengths, state.finish_reason))
        now = self.clock()
        committed = sum(int(lengths[slot] - self.lengths[slot]) for slot in self.held)
        self.dispatches.append(Dispatch(now - start, committed, len(self.held)))
        self.lengths = lengths.astype(np.int64)
        for slot in [slot for slot in self.held if reasons[slot] != RUNNING]:
            self.ended.append((*self.held.pop(slot), now, state, slot))


def _served(request: Request, admitted_s: float, finished_s: float, state: State, slot: int) -> Served:
    totals = state.totals
    return Served(
        request=request,
        tokens=np.asarray(state.tokens)[slot, : int(state.lengths[slot])],
        stopped=int(state.finish_reason[slot]) == STOP,
        admitted_s=admitted_s,
        finished_s=finished_s,
        rounds=int(totals.rounds[slot]),
        accepted=np.asarray(totals.accepted)[slot],
        tested=np.asarray(totals.tested)[slot],
    )
