"""The TPU kernels where there is no TPU: the backend "tpu" with its kernels in an interpreter."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax

from flashspec.attention import tpu
from flashspec.attention.backends import BACKENDS
from pallas_kernels.tpu.attention_backward import attention_backward
from pallas_kernels.tpu.attention_forward import attention_forward


@contextlib.contextmanager
def interpreted_tpu(interpret: Any = True) -> Iterator[None]:
    """Within it, "tpu" runs on any platform.

    Args:
      interpret: True for the quick interpreter, which knows arrays only, or `pltpu.InterpretParams`, which simulates
        memory spaces, copies and races.
    """
    kernels = tpu.Kernels(attention_forward, attention_backward, interpret)
    compiled = BACKENDS["tpu"]
    BACKENDS["tpu"] = dataclasses.replace(  # type: ignore[index]
        compiled,
        supports=tpu.kernel_refusals,
        attend=functools.partial(tpu.tpu_attention, kernels),
        stats=functools.partial(tpu.tpu_stats, kernels),
    )
    jax.clear_caches()  # calls are compiled by the name of their backend
    try:
        yield
    finally:
        BACKENDS["tpu"] = compiled  # type: ignore[index]
        jax.clear_caches()
