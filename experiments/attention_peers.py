"""Other implementations of attention on a GPU, for comparison: each imported only where it is installed."""

import functools
import importlib.util
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.attention_cases import Case

type Attend = Callable[[jax.Array, jax.Array, jax.Array, Case], jax.Array]


def cudnn(query: jax.Array, key: jax.Array, value: jax.Array, case: Case) -> jax.Array:
    """cuDNN's fused attention through `jax.nn`."""
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=case.is_causal, local_window_size=case.window, implementation="cudnn"
    )


def flash_attention_3(query: jax.Array, key: jax.Array, value: jax.Array, case: Case) -> jax.Array:
    """FlashAttention-3 by flash-attn3-jax, whose wheel is built for a head size of 128."""
    from flash_attn3_jax import flash_mha, flash_mha_varlen

    options = {"is_causal": case.is_causal, "window_size": case.window or (-1, -1)}
    if not case.documents:
        return flash_mha(query, key, value, **options)
    ends = np.cumsum(np.tile(case.documents, case.B), dtype=np.int32)
    starts = jnp.asarray(np.concatenate([np.zeros(1, np.int32), ends]))
    flat = (x.reshape(case.B * case.T, *x.shape[2:]) for x in (query, key, value))
    longest = max(case.documents)
    packed = flash_mha_varlen(*flat, starts, max_seqlen_q=longest, max_seqlen_k=longest, **options)
    return packed.reshape(query.shape)


def tokamax(query: jax.Array, key: jax.Array, value: jax.Array, case: Case) -> jax.Array:
    """tokamax's Mosaic GPU kernel; for packed documents its own form of mask, the first key of each query."""
    if not case.documents:
        from tokamax import dot_product_attention

        return dot_product_attention(
            query, key, value, is_causal=case.is_causal, local_window_size=case.window, implementation="mosaic"
        )
    from tokamax._src.ops.attention.base import Mask
    from tokamax._src.ops.attention.pallas_mosaic_gpu import PallasMosaicGpuFlashAttention

    lengths = np.array(case.documents)
    first = np.repeat(np.cumsum(lengths) - lengths, lengths).astype(np.int32)
    mask = Mask(k_start=jnp.asarray(first)[None, None], is_causal=case.is_causal)
    return PallasMosaicGpuFlashAttention()(query, key, value, mask=mask)


def attention_mgpu(query: jax.Array, key: jax.Array, value: jax.Array, case: Case) -> jax.Array:
    """jax's own Mosaic GPU kernel, whose scale is 1: the query is scaled before it, which takes a pass over it."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu as kernel

    keys = 128 if case.H <= 128 else 64
    backward = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)
    sizes: dict[str, Any] = {"block_q": 64, "block_kv": keys, "max_concurrent_steps": 2, **backward}
    config = kernel.TuningConfig(**sizes, causal=case.is_causal)
    scaled = (query.astype(jnp.float32) * case.H**-0.5).astype(query.dtype)
    return kernel.attention(scaled, key, value, config)


def triton(
    query: jax.Array, key: jax.Array, value: jax.Array, case: Case, keys: int | None = None, blocks: int = 32
) -> jax.Array:
    """jax's own Pallas Triton kernel, which knows one head size and as many key/value heads as query heads.

    The forward takes `keys` at once. `blocks` are the backward's; by its own defaults (`BlockSizes.get_default`) jax's
    kernel takes 128 keys and blocks of 32.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    key, value = (jnp.repeat(x, case.N // case.K, axis=2) for x in (key, value))
    ids = jnp.asarray(case.segment_ids) if case.documents else None
    backward = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), blocks)
    sizes = BlockSizes(128 if case.H <= 128 else 64, keys or (128 if case.H <= 64 else 64), **backward)
    return mha(query, key, value, ids, case.H**-0.5, case.is_causal, sizes)


class Peer(NamedTuple):
    """One implementation: what runs it, which package it needs, and which calls it takes."""

    attend: Attend
    package: str
    takes: Callable[[Case], Any]


TRITON = "jax Triton"
PEERS: dict[str, Peer] = {
    "cuDNN": Peer(cudnn, "jax", lambda case: not case.documents),
    "FlashAttention-3": Peer(flash_attention_3, "flash_attn3_jax", lambda case: case.H == 128),
    "tokamax": Peer(tokamax, "tokamax", lambda case: not case.documents or case.is_causal),
    "attention_mgpu": Peer(attention_mgpu, "jax", lambda case: not case.window and not case.documents),
    TRITON: Peer(triton, "jax", lambda case: not case.window),
}
# Those that run wherever the portable kernels do.
PORTABLE = {
    "forward": {
        f"jax Triton, {keys} keys": PEERS[TRITON]._replace(attend=functools.partial(triton, keys=keys))
        for keys in (64, 128)
    },
    "training": {
        TRITON: PEERS[TRITON],
        "jax Triton, blocks of 64": PEERS[TRITON]._replace(attend=functools.partial(triton, blocks=64)),
    },
}


def installed(case: Case, peers: Mapping[str, Peer] = PEERS) -> dict[str, Attend]:
    """The peers that can run a case here, by name."""
    if jax.default_backend() != "gpu":
        return {}
    return {
        name: peer.attend
        for name, peer in peers.items()
        if importlib.util.find_spec(peer.package) is not None and peer.takes(case)
    }
