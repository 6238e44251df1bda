"""A decoder step through all layers, a few in each launch: `decode_block` with attention over a dense cache within.

Weights are copied ahead of everything that waits, attention and the next layer too.
"""

import functools
from collections.abc import Callable

import jax
from jax import Array

from flashspec.fusion import backends, decode_block_hopper
from flashspec.fusion.decode_block_request import LayersArrays, LayersRequest
from flashspec.fusion.decode_block_rules import with_rules

type Result = tuple[Array, tuple[Array, ...], tuple[Array, ...]]


def refusals(request: LayersRequest) -> tuple[str, ...]:
    """Why the kernel cannot run a step; empty when it can."""
    return decode_block_hopper.refusals(request.block, request.attention)


def decode_layers(request: LayersRequest, arrays: LayersArrays, twin: Callable[[LayersArrays], Result]) -> Result:
    """All layers of a decoder step, by the Hopper kernel.

    Attention is causal: token t of batch row b sees positions up to lengths[0, b] + t, and below lengths[1, b].

    Args:
      request: of `make_layers_request`, one that `refusals` has nothing against.
      arrays: of the step. Caches that are donated are written in place.
      twin: the same by other means, for gradients and under `jax.vmap`.

    Returns:
      x [rows, C] behind the last layer, and the keys and values of all layers with the new ones in them.
    """
    with jax.named_scope("flashspec.fusion.decode_layers.hopper"):
        kernel = backends.decode_block_kernel()
        return with_rules(functools.partial(decode_block_hopper.decode_layers, kernel, request), twin)(arrays)
