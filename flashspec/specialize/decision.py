"""Whether to compile for a bucket before its first request: eq. 33.9, and what it leaves out."""

import dataclasses

from flashspec.costs import net_benefit, pays_off
from flashspec.costs.numbers import Number, exact, nonnegative


@dataclasses.dataclass(frozen=True)
class Decision:
    """An answer with its reasons; true in an `if` when the answer is yes.

    Attributes:
      precompile: the answer.
      net_benefit: n (t_e - t_c) - C, in the unit of the times.
      reasons: in words, the deciding one last.
    """

    precompile: bool
    net_benefit: Number
    reasons: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.precompile


def should_precompile(
    compile_time: Number,
    calls: int,
    time_before: Number,
    time_after: Number,
    *,
    cached_load_time: Number | None = None,
    memory_bytes: int | None = None,
    free_bytes: int | None = None,
    first_request_deadline: Number | None = None,
) -> Decision:
    """Decide for one bucket; call it again when its number of calls changes.

    C + n t_c < n t_e, strictly                                                                           (eq. 33.9)

    Three things besides the sum count. An executable in the persistent cache costs its loading instead of its
    compilation. One that does not fit into memory is refused whatever it saves. Where the first request has a deadline
    that only the executable meets, it is compiled even at a loss.

    Args:
      compile_time: C >= 0. All times in one unit.
      calls: n >= 0, calls expected of this bucket.
      time_before: t_e >= 0, a call without the executable: op by op, or in the next larger bucket.
      time_after: t_c >= 0, a call of the executable.
      cached_load_time: what loading takes where the persistent cache holds the executable; None where it does not.
      memory_bytes: what the executable needs; None when unknown.
      free_bytes: what there is; None for no limit.
      first_request_deadline: the longest that the first request may take; None for no deadline.

    Returns:
      The decision.

    Raises:
      ValueError: a negative or non-finite argument, or a limit of memory without the memory that is needed.

    Source: chapter 33.4, exercise 33.6.
    """
    cost = compile_time if cached_load_time is None else nonnegative("cached_load_time", cached_load_time)
    benefit = net_benefit(cost, calls, time_before, time_after)
    gains = pays_off(cost, calls, time_before, time_after)
    spent = "compiling" if cached_load_time is None else "loading from the persistent cache"
    compared = "more than" if gains else "no more than"
    saved = exact(calls) * (exact(time_before) - exact(time_after))
    reasons = [f"{calls} calls save {float(saved):.4g}, {compared} {spent} takes ({float(cost):.4g})"]
    answer = gains
    if first_request_deadline is not None:
        limit = nonnegative("first_request_deadline", first_request_deadline)
        forced = time_before > limit >= time_after
        answer = answer or forced
        reasons.append(_deadline_reason(limit, time_before, time_after))
    if free_bytes is not None:
        needed = nonnegative("memory_bytes", -1 if memory_bytes is None else memory_bytes)
        fits = needed <= nonnegative("free_bytes", free_bytes)
        answer = answer and fits
        reasons.append(f"{needed} bytes {'fit' if fits else 'do not fit'} into {free_bytes}")
    return Decision(answer, benefit, tuple(reasons))


def _deadline_reason(limit: Number, time_before: Number, time_after: Number) -> str:
    if time_before <= limit:
        return f"the first request meets its deadline of {float(limit):.4g} without the executable"
    if time_after <= limit:
        return f"only the executable meets the first request's deadline of {float(limit):.4g}"
    return f"not even the executable meets the first request's deadline of {float(limit):.4g}"
