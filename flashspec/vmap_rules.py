"""What rules of kernels for `jax.vmap` share."""

from collections.abc import Callable, Sequence

from jax import Array, lax


def one_by_one[T](call: Callable[..., T], batched: Sequence[bool], arrays: Sequence[Array]) -> T:
    """`call` for each entry of the mapped axis in turn, where that cannot be folded into an axis of the kernel.

    Args:
      call: takes the arrays without the mapped axis.
      batched: which of the arrays have it, as their first.
      arrays: of the call.

    Returns:
      What the calls return, stacked along a first axis.
    """

    def one(mapped: Sequence[Array]) -> T:
        rest = iter(mapped)
        return call(*(next(rest) if is_batched else x for x, is_batched in zip(arrays, batched, strict=True)))

    return lax.map(one, [x for x, is_batched in zip(arrays, batched, strict=True) if is_batched])
