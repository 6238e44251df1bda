"""Other implementations of attention on a GPU, for comparison: each imported only where it is installed."""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax

type Attend = Callable[..., jax.Array]


def cudnn(query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool, window: Any = None) -> jax.Array:
    """cuDNN's fused attention through `jax.nn`."""
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=is_causal, local_window_size=window, implementation="cudnn"
    )


def flash_attention_3(query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool, window: Any) -> jax.Array:
    """FlashAttention-3 by flash-attn3-jax, whose wheel is built for a head size of 128."""
    from flash_attn3_jax import flash_mha

    return flash_mha(query, key, value, is_causal=is_causal, window_size=window or (-1, -1))


def tokamax(query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool, window: Any) -> jax.Array:
    """tokamax's Mosaic GPU kernel."""
    from tokamax import dot_product_attention

    return dot_product_attention(
        query, key, value, is_causal=is_causal, local_window_size=window, implementation="mosaic"
    )


# What each needs to be installed, and the head sizes that it takes.
PEERS: dict[str, tuple[Attend, str, Callable[[int], bool]]] = {
    "cuDNN": (cudnn, "jax", lambda size: True),
    "FlashAttention-3": (flash_attention_3, "flash_attn3_jax", lambda size: size == 128),
    "tokamax": (tokamax, "tokamax", lambda size: True),
}


def installed(head_size: int) -> dict[str, Attend]:
    """The peers that can run here, by name."""
    if jax.default_backend() != "gpu":
        return {}
    return {
        name: attend
        for name, (attend, package, takes) in PEERS.items()
        if importlib.util.find_spec(package) is not None and takes(head_size)
    }
