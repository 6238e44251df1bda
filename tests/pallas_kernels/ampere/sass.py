"""The portable kernels compiled for an A100 and an H200 where there is none; see `tests.pallas_kernels.hopper.sass`.

    python -m tests.pallas_kernels.ampere.sass "8.0 forward 128 causal" ...

The number is the compute capability of the GPU; one process compiles for one of them.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tests.pallas_kernels.hopper import sass
from tests.pallas_kernels.hopper.sass import N, T, Variant

MODULE = "tests.pallas_kernels.ampere.sass"
TARGETS = {"8.0": Path(__file__).with_name("a100.txtpb"), "9.0": sass.TARGET}
MASKS = ("full", "causal", "segments")


def _forward(capability: str, H: int, kind: str, make: sass.Make, **settings: Any) -> Any:
    import dataclasses

    import jax.numpy as jnp

    from pallas_kernels.gpu.ampere.attention_forward import attention_forward
    from pallas_kernels.gpu.ampere.attention_forward_config import AttentionShape, heuristic, shared_memory
    from pallas_kernels.gpu.hopper.attention_mask import SegmentIds

    shape = AttentionShape(2, T, T, N, N, H, H)
    config = heuristic(shape, shared_memory(capability), bulk=capability != "8.0")
    config = dataclasses.replace(config, **settings)

    def call(query: Any, key: Any, value: Any, *ids: Any) -> Any:
        segments = SegmentIds(*ids) if ids else None
        return attention_forward(query, key, value, None, segments, mask=sass._mask(kind), scale=0.1, config=config)

    x = make((2, T, N, H), jnp.bfloat16)
    return call, (x, x, x, *sass._segments(kind, make))


def _backward(capability: str, H: int, kind: str, deterministic: bool, make: sass.Make, **settings: Any) -> Any:
    import dataclasses

    import jax.numpy as jnp

    from pallas_kernels.gpu.ampere.attention_backward import attention_backward
    from pallas_kernels.gpu.ampere.attention_backward_config import heuristic
    from pallas_kernels.gpu.ampere.attention_forward_config import AttentionShape, shared_memory
    from pallas_kernels.gpu.hopper.attention_mask import SegmentIds

    facts: Any = {"bulk": capability != "8.0", "deterministic": deterministic}
    config = heuristic(AttentionShape(2, T, T, N, N, H, H), shared_memory(capability), **facts)
    config = dataclasses.replace(config, **settings)

    def call(*arrays: Any) -> Any:
        query, key, value, gradient, lse, delta, *ids = arrays
        segments = SegmentIds(*ids) if ids else None
        options: Any = {"mask": sass._mask(kind), "scale": 0.1, "deterministic": deterministic}
        return attention_backward(query, key, value, gradient, lse, delta, None, segments, config=config, **options)

    x, row = make((2, T, N, H), jnp.bfloat16), make((2, N, T), jnp.float32)
    return call, (x, x, x, x, row, row, *sass._segments(kind, make))


def _planted(make: sass.Make) -> Any:
    """128 queries and as many keys at once, which the settings would refuse."""
    from pallas_kernels.gpu.ampere import attention_forward_config

    call, arguments = _forward("9.0", 128, "full", make, block_kv=128)

    def unchecked(*arrays: Any) -> Any:
        with mock.patch.object(attention_forward_config, "REGISTERS", 1000):
            return call(*arrays)

    return unchecked, arguments


PLANTED = "9.0 planted: more scores than registers"
VARIANTS: dict[str, Variant] = {
    **{
        f"{capability} forward {H} {kind}": functools.partial(_forward, capability, H, kind)
        for capability in TARGETS
        for H in (64, 128, 256)
        for kind in MASKS
    },
    **{
        f"{capability} backward {H} {kind}{' deterministic' * deterministic}": functools.partial(
            _backward, capability, H, kind, deterministic
        )
        for capability in TARGETS
        for H in (64, 128)
        for kind in MASKS
        for deterministic in (False, True)
    },
    PLANTED: _planted,
}


def _compile(name: str) -> None:
    """Compile a variant for its GPU, which Mosaic would look for among those at hand."""
    from jax.experimental.mosaic.gpu import utils

    capability = name.split()[0]
    major, minor = capability.split(".")
    assert all(other.startswith(capability) for other in sys.argv[1:]), "variants of one compute capability, by name"
    infer: Callable[[], tuple[int, int]] = lambda: (int(major), int(minor))  # noqa: E731
    with mock.patch.object(utils, "_infer_arch", infer):
        sass.compile_variant(VARIANTS[name], TARGETS[capability])


if __name__ == "__main__":
    sass.main(sys.argv[1:], VARIANTS, _compile)
