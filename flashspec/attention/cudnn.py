"""cuDNN's fused attention through `jax.nn`, for the calls that it computes as we define them.

cuDNN hides keys by adding a large negative number, so a row without keys becomes a mean of values where ours is 0; it
aligns causal masks at the top left; it leaves rows past a length undefined; its dropout draws bits of its own. A call
that could show any such difference is refused, and so is what the wrapper in `jax.nn` does not return.
"""

import jax
import jax.numpy as jnp
import numpy as np

from flashspec.attention.request import AttentionOperands, AttentionRequest

# Hopper takes 256, but a request does not say which GPU it is for.
LARGEST_HEAD = 128


def refusals(request: AttentionRequest) -> tuple[str, ...]:
    """Why cuDNN cannot compute this call, forward and backward, exactly as defined here; empty when it can."""
    left, right = request.window
    rules = (
        (request.platform != "cuda", f"runs on CUDA GPUs only, not on {request.platform}"),
        (request.dtype not in (jnp.bfloat16, np.float16), f"computes in bfloat16 or float16, not in {request.dtype}"),
        (request.Hv != request.H, f"is used with one head size only, not with H = {request.H} and Hv = {request.Hv}"),
        (
            request.H > LARGEST_HEAD or request.H % 8 != 0,
            f"needs a head size that is a multiple of 8 and at most {LARGEST_HEAD}, not {request.H}",
        ),
        (0 in (request.B, request.T, request.S), "takes no empty operand"),
        (request.T % 2 or request.S % 2, f"has a backward for even lengths only, not for {request.T} and {request.S}"),
        (request.scale <= 0, f"is used with a positive scale, not {request.scale}"),
        (request.statistics, "does not return softmax statistics"),
        (request.return_lse, "does not return the log-normaliser differentiably"),
        (request.logits_soft_cap is not None, "has no soft cap"),
        (request.dropout_rate > 0, "draws dropout bits of its own"),
        (request.is_causal and request.T != request.S, "aligns a causal mask at the top left when T != S"),
        (
            (left is not None or right is not None) and not request.is_causal,
            "limits a window to the left, under a causal mask",
        ),
        *((option in request.options, reason) for option, reason in _OPTIONS.items()),
    )
    return tuple(reason for refused, reason in rules if refused)


_OPTIONS = {
    "bias": "rounds a bias to the dtype of the query, and treats -inf as a large finite number",
    "mask": "turns a mask into a finite bias, so that a row without keys is not 0",
    "q_positions": "masks by array index, not by position",
    "kv_positions": "masks by array index, not by position",
    "q_lengths": "leaves rows past a length undefined",
    "kv_lengths": "does not define a row whose length is 0",
    "q_segment_ids": "has no segment ids",
    "sinks": "has no sinks",
}


def cudnn_attention(request: AttentionRequest, operands: AttentionOperands) -> tuple[jax.Array, None]:
    """Attention output [B, T, N, Hv] by cuDNN, which returns no lse."""
    left, _ = request.window
    output = jax.nn.dot_product_attention(
        *(_batch_first(x) for x in (operands.query, operands.key, operands.value)),
        scale=request.scale,
        is_causal=request.is_causal,
        local_window_size=None if left is None else (left, 0),
        implementation="cudnn",
    )
    return output, None


def _batch_first(x: jax.Array) -> jax.Array:
    """The same array; under `vmap` with another in_axes than 0, a reshape moves the mapped axis first, as cuDNN's
    batching rule asks."""
    return x.reshape(*x.shape[:2], -1).reshape(x.shape)
