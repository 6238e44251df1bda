"""Attention by our Hopper kernels: what they refuse, their launch settings, and what they read of a call.

The kernels are passed in, so that tests run the very same code over stand-ins. They take lengths in multiples of 8 and
head sizes in multiples of 64; others are padded, a copy that the plan counts.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from flashspec.attention import tuning
from flashspec.attention.gpu_kernels import (
    Family,
    Kernels,
    Program,
    kernel_attention,
    kernel_stats,
    launch_table,
    least_heads,
    padded_bytes,
    shape_of,
)
from flashspec.attention.hopper_mask import may_hide
from flashspec.attention.lifting import uneven_groups
from flashspec.attention.request import AttentionOperands, AttentionRequest
from flashspec.attention.settings import Hopper, settings_of
from flashspec.devices import multiprocessors
from flashspec.online_softmax import SoftmaxStats
from flashspec.selection import elsewhere
from pallas_kernels.gpu.hopper import attention_backward_config, attention_forward_config
from pallas_kernels.gpu.hopper.attention_backward_config import BackwardConfig, BackwardShape
from pallas_kernels.gpu.hopper.attention_forward_config import AttentionShape, ForwardConfig
from pallas_kernels.gpu.hopper.attention_mask import AttentionMask
from pallas_kernels.launch import round_up

CAPABILITY = "9.0"
LARGEST_HEAD = 256
LENGTH_MULTIPLE = 8


def refusals(request: AttentionRequest) -> tuple[str, ...]:
    """Why the Hopper kernels cannot run a call, forward and backward; empty when they can."""
    return elsewhere(CAPABILITY, request.platform, request.compute_capability) + kernel_refusals(request)


def kernel_refusals(request: AttentionRequest) -> tuple[str, ...]:
    """`refusals` but for the device: what the kernels cannot do wherever they are compiled for."""
    rules = (
        (request.dtype not in (jnp.bfloat16, np.float16), f"computes in bfloat16 or float16, not in {request.dtype}"),
        (max(request.H, request.Hv) > LARGEST_HEAD, f"takes head sizes up to {LARGEST_HEAD}"),
        (request.dropout_rate > 0, "has no dropout"),
        uneven_groups(request),
        *((option in request.options, reason) for option, reason in _OPTIONS.items()),
    )
    return tuple(reason for refused, reason in rules if refused) or _settings_refusals(request)


def _settings_refusals(request: AttentionRequest) -> tuple[str, ...]:
    """Why a call cannot have the launch settings that were given with it."""
    given = _settings(request)
    reasons: dict[str, tuple[str, ...]] = {}
    if given.forward is not None:
        reasons["forward"] = given.forward.refusals(_padded_shape(request), request.statistics)
    if given.backward is not None:
        reasons["backward"] = attention_backward_config.config_refusals(
            _backward_shape(request), given.backward, deterministic=given.deterministic
        )
    return tuple(f"the {name} settings given: {reason}" for name in reasons for reason in reasons[name])


_OPTIONS = {
    "bias": "adds no bias",
    "mask": "reads no explicit mask",
    "position_array": "takes positions as `Contiguous` only, not as an array",
}


def launch_config(request: AttentionRequest) -> Mapping[str, int]:
    """Launch settings of forward and backward, for the plan."""
    return launch_table(_forward_config(request)[0], _backward_config(request)[0], _settings(request).deterministic)


def sources(request: AttentionRequest) -> Mapping[str, str]:
    """Where the launch settings of each direction come from, for the plan: "given", "tuned" or "heuristic"."""
    return {"forward": _forward_config(request)[1], "backward": _backward_config(request)[1]}


def searches(request: AttentionRequest) -> Mapping[str, tuple[tuning.TuningKey, tuple[Any, ...]]]:
    """For each kernel, by what an entry would be found, and the settings worth timing, the heuristic's first."""
    forward, wide, deterministic = _padded_shape(request), _backward_shape(request), _settings(request).deterministic
    configs = attention_forward_config.candidates(forward, request.statistics, multiprocessors(request.device_kind))
    return {
        "attention_forward": (tuning.key_of(request, forward), tuple(configs)),
        "attention_backward": (
            tuning.key_of(request, wide, deterministic),
            attention_backward_config.candidates(wide, deterministic=deterministic),
        ),
    }


def copies(request: AttentionRequest) -> Mapping[str, int]:
    """Bytes of each array that is padded, or blanked where nobody sees it, for the plan."""
    padded, itemsize = _padded_shape(request), request.dtype.itemsize
    own = padded_bytes(shape_of(request), padded, itemsize, blanked=may_hide(request))
    wider = padded_bytes(padded, AttentionShape(*_backward_shape(request)), itemsize)
    return own | {f"{name} of the backward": size for name, size in wider.items()}


def hopper_attention(kernels: Kernels, request: AttentionRequest, operands: AttentionOperands) -> tuple[Array, Array]:
    """Attention output [B, T, N, Hv] and log-normaliser [B, T, N], differentiable.

    Args:
      kernels: the kernels, or stand-ins.
      request: static facts of the call, one that `kernel_refusals` has nothing against.
      operands: its arrays.
    """
    return kernel_attention(_family(kernels), request, operands)


def hopper_stats(kernels: Kernels, request: AttentionRequest, operands: AttentionOperands) -> SoftmaxStats:
    """Statistics (m, l, u) of the call's keys, rows [B, T, N]; arguments as in `hopper_attention`."""
    return kernel_stats(_family(kernels), request, operands)


def _family(kernels: Kernels) -> Family:
    return Family("hopper", _padded_shape, functools.partial(_program, kernels))


def _program(kernels: Kernels, request: AttentionRequest, mask: AttentionMask) -> Program:
    deterministic = _settings(request).deterministic
    if not attention_backward_config.is_fused(_backward_shape(request), deterministic=deterministic):
        kernels = kernels._replace(delta=None)  # nobody adds to dQ
    return Program(
        kernels,
        mask,
        request.scale,
        request.logits_soft_cap,
        request.statistics,
        _forward_config(request)[0],
        _backward_config(request)[0],
        backward_heads(request.H, request.Hv),
        deterministic,
    )


def padded_heads(H: int, Hv: int) -> tuple[int, int]:
    """The head sizes that the forward computes with."""
    return least_heads(attention_backward_config.HEAD_SIZES, H, Hv)


def backward_heads(H: int, Hv: int) -> tuple[int, int]:
    """The head sizes that the backward computes with: the least that it takes."""
    sizes = (*attention_backward_config.HEAD_SIZES, *attention_backward_config.WIDE_HEAD_SIZES)
    return next(pair for pair in sizes if pair[0] >= H and pair[1] >= Hv)


def _padded_shape(request: AttentionRequest) -> AttentionShape:
    T, S = (round_up(size, LENGTH_MULTIPLE) for size in (request.T, request.S))
    return AttentionShape(request.B, T, S, request.N, request.K, *padded_heads(request.H, request.Hv))


def _backward_shape(request: AttentionRequest) -> BackwardShape:
    H, Hv = backward_heads(request.H, request.Hv)
    return BackwardShape(*_padded_shape(request)._replace(H=H, Hv=Hv))


def _settings(request: AttentionRequest) -> Hopper:
    return settings_of(request.settings, Hopper)


def _forward_config(request: AttentionRequest) -> tuple[ForwardConfig, str]:
    """Settings of the forward, and where they come from. Those of the call as a whole: `vmap` and devices that share it
    out change no bit of its result."""
    shape, given = _padded_shape(request), _settings(request).forward
    heuristic = functools.partial(
        attention_forward_config.heuristic, shape, request.statistics, programs=multiprocessors(request.device_kind)
    )
    key = None if request.statistics else tuning.key_of(request, shape)
    return tuning.choose("attention_forward", request.device_kind, key, given, heuristic)


def _backward_config(request: AttentionRequest) -> tuple[BackwardConfig, str]:
    """As `_forward_config`, of the backward."""
    shape, given = _backward_shape(request), _settings(request)
    key = tuning.key_of(request, shape, given.deterministic)
    heuristic = functools.partial(attention_backward_config.heuristic, shape)
    return tuning.choose("attention_backward", request.device_kind, key, given.backward, heuristic)
