"""The TPU kernels where there is no TPU: the backend "tpu" with its kernels in an interpreter."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax

from flashspec.attention import backends, tpu, tpu_decode
from flashspec.attention.backends import BACKENDS
from pallas_kernels.tpu.attention_backward import attention_backward
from pallas_kernels.tpu.attention_backward_config import AttentionBackwardConfig
from pallas_kernels.tpu.attention_decode import Cache, DecodeRows, attention_decode
from pallas_kernels.tpu.attention_forward import attention_forward
from pallas_kernels.tpu.attention_forward_config import AttentionForwardConfig


@contextlib.contextmanager
def interpreted_tpu(interpret: Any = True) -> Iterator[None]:
    """Within it, "tpu" runs on any platform, decoding included.

    Args:
      interpret: True for the quick interpreter, which knows arrays only, or `pltpu.InterpretParams`, which simulates
        memory spaces, copies and races.
    """
    kernels = tpu.Kernels(attention_forward, attention_backward, interpret)
    compiled = BACKENDS["tpu"]
    BACKENDS["tpu"] = dataclasses.replace(  # type: ignore[index]
        compiled,
        supports=lambda request: tpu.kernel_refusals(request) + backends._partitioned(request),
        attend=functools.partial(tpu.tpu_attention, kernels),
        stats=functools.partial(tpu.tpu_stats, kernels),
    )
    decode = tpu_decode.Kernel(attention_decode, Cache, DecodeRows, interpret)
    jax.clear_caches()  # calls are compiled by the name of their backend
    try:
        with (
            mock.patch.object(backends, "tpu_decode_kernel", return_value=decode),
            mock.patch.object(tpu_decode, "refusals", tpu_decode.kernel_refusals),
        ):
            yield
    finally:
        BACKENDS["tpu"] = compiled  # type: ignore[index]
        jax.clear_caches()


def races_found() -> bool:
    """Whether the interpreter of memory has seen a race since it last started; read after the call."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return bool(interpret_pallas_call.races.races_found)


@contextlib.contextmanager
def small_blocks(q: int = 128, kv: int = 128) -> Iterator[None]:
    """Within it, blocks are small, so that a few hundred queries and keys have several."""
    forward, backward = (kind(q, kv, 128, 128) for kind in (AttentionForwardConfig, AttentionBackwardConfig))
    with (
        mock.patch.object(tpu, "_forward_config", return_value=forward),
        mock.patch.object(tpu, "_backward_config", return_value=backward),
    ):
        jax.clear_caches()
        yield
        jax.clear_caches()
