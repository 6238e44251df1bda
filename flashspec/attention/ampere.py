"""Attention by our portable GPU kernels: what they refuse, their launch settings, and what they read of a call.

They run on every NVIDIA GPU of compute capability 8.0 or more. Lengths are padded to the kernels' blocks and head sizes
to what they are compiled for: a copy that the plan counts.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

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
from flashspec.attention.hopper import kernel_refusals
from flashspec.attention.hopper_mask import may_hide
from flashspec.attention.request import AttentionOperands, AttentionRequest
from flashspec.attention.settings import Ampere, settings_of
from flashspec.online_softmax import SoftmaxStats
from flashspec.selection import device_named
from pallas_kernels.gpu.ampere import attention_backward_config, attention_forward_config
from pallas_kernels.gpu.ampere.attention_backward_config import BackwardConfig
from pallas_kernels.gpu.ampere.attention_forward_config import AttentionShape, ForwardConfig, shared_memory
from pallas_kernels.gpu.hopper.attention_mask import AttentionMask
from pallas_kernels.launch import round_up

OLDEST = 8  # compute capability of the first GPU whose mma takes bfloat16 and that copies asynchronously
COPY_ENGINE = 9  # that of the first GPU with a copy engine, which is then the way to copy in Mosaic GPU
LARGEST_BACKWARD_HEAD = 128
FORWARD, BACKWARD = "ampere_attention_forward", "ampere_attention_backward"  # names of tuned files
BLOCKS = (64, 128)  # lengths are padded to the first if they fit it, else to multiples of the second


def refusals(request: AttentionRequest) -> tuple[str, ...]:
    """Why the portable kernels cannot run a call, forward and backward; empty when they can."""
    device = device_named(request.platform, request.compute_capability)
    here = request.platform == "cuda" and _generation(request) >= OLDEST
    elsewhere = () if here else (f"runs on cuda of compute capability {OLDEST}.0 or more only, not on {device}",)
    return elsewhere + (kernel_refusals(dataclasses.replace(request, settings=())) or _settings_refusals(request))


def _settings_refusals(request: AttentionRequest) -> tuple[str, ...]:
    """Why a call cannot have the launch settings that were given with it."""
    given, shape, memory = _settings(request), _padded_shape(request), shared_memory(request.compute_capability)
    reasons: dict[str, tuple[str, ...]] = {}
    if given.forward is not None:
        reasons["forward"] = _copying(request, given.forward).refusals(shape, memory)
    if given.backward is not None and backward(request) == "ampere":
        config = _copying(request, given.backward)
        reasons["backward"] = config.refusals(shape, memory, deterministic=_deterministic(request))
    return tuple(f"the {name} settings given: {reason}" for name in reasons for reason in reasons[name])


def backward(request: AttentionRequest) -> str:
    """Which backend computes the gradients of a call: "ampere", or "blockwise" where a head is too wide for it."""
    return "ampere" if max(request.H, request.Hv) <= LARGEST_BACKWARD_HEAD else "blockwise"


def launch_config(request: AttentionRequest) -> Mapping[str, int]:
    """Launch settings of forward and backward, for the plan."""
    own = _backward_config(request)[0] if backward(request) == "ampere" else None
    return launch_table(_forward_config(request)[0], own, _deterministic(request))


def sources(request: AttentionRequest) -> Mapping[str, str]:
    """Where the launch settings of each direction come from, for the plan: "given", "tuned" or "heuristic"."""
    both = {"forward": _forward_config(request)[1], "backward": _backward_config(request)[1]}
    return both if backward(request) == "ampere" else {"forward": both["forward"]}


def searches(request: AttentionRequest) -> Mapping[str, tuple[tuning.TuningKey, tuple[Any, ...]]]:
    """For each kernel, by what an entry would be found, and the settings worth timing, the heuristic's first."""
    shape, deterministic = _padded_shape(request), _deterministic(request)
    memory, bulk = shared_memory(request.compute_capability), _bulk(request)
    forwards = attention_forward_config.candidates(shape, memory, bulk=bulk)
    backwards = attention_backward_config.candidates(shape, memory, bulk=bulk, deterministic=deterministic)
    return {
        FORWARD: (tuning.key_of(request, shape), tuple(forwards)),
        BACKWARD: (tuning.key_of(request, shape, deterministic), tuple(backwards)),
    }


def copies(request: AttentionRequest) -> Mapping[str, int]:
    """Bytes of each array that is padded, or blanked where nobody sees it, for the plan."""
    blanked = may_hide(request)
    return padded_bytes(shape_of(request), _padded_shape(request), request.dtype.itemsize, blanked=blanked)


def ampere_attention(kernels: Kernels, request: AttentionRequest, operands: AttentionOperands) -> tuple[Array, Array]:
    """Attention output [B, T, N, Hv] and log-normaliser [B, T, N], differentiable.

    Args:
      kernels: those of `pallas_kernels.gpu.ampere`, or stand-ins with their signatures.
      request: static facts of the call, one that `refusals` has nothing against but the device.
      operands: its arrays.
    """
    return kernel_attention(_family(kernels), request, operands)


def ampere_stats(kernels: Kernels, request: AttentionRequest, operands: AttentionOperands) -> SoftmaxStats:
    """Statistics (m, l, u) of the call's keys, rows [B, T, N]; arguments as in `ampere_attention`."""
    return kernel_stats(_family(kernels), request, operands)


def _family(kernels: Kernels) -> Family:
    return Family("ampere", _padded_shape, functools.partial(_program, kernels), backward)


def _program(kernels: Kernels, request: AttentionRequest, mask: AttentionMask) -> Program:
    native = backward(request) == "ampere"
    return Program(
        kernels,
        mask,
        request.scale,
        request.logits_soft_cap,
        request.statistics,
        _forward_config(request)[0],
        _backward_config(request)[0] if native else None,
        _padded_shape(request)[-2:],
        _deterministic(request),
    )


def _generation(request: AttentionRequest) -> int:
    """The major number of the compute capability; 0 where it is not known."""
    return int((request.compute_capability or "0").split(".")[0])


def _padded_shape(request: AttentionRequest) -> AttentionShape:
    T, S = (round_up(size, BLOCKS[0] if size <= BLOCKS[0] else BLOCKS[1]) for size in (request.T, request.S))
    heads = least_heads(attention_backward_config.HEAD_SIZES, request.H, request.Hv)
    return AttentionShape(request.B, T, S, request.N, request.K, *heads)


def _settings(request: AttentionRequest) -> Ampere:
    return settings_of(request.settings, Ampere)


def _forward_config(request: AttentionRequest) -> tuple[ForwardConfig, str]:
    """Settings of the forward, and where they come from. Those of the call as a whole: `vmap` and devices that share it
    out change no bit of its result."""
    shape, memory = _padded_shape(request), shared_memory(request.compute_capability)
    heuristic = functools.partial(attention_forward_config.heuristic, shape, memory, bulk=_bulk(request))
    key = None if request.statistics else tuning.key_of(request, shape)
    found, source = tuning.choose(FORWARD, request.device_kind, key, _settings(request).forward, heuristic)
    return _copying(request, found), source


def _backward_config(request: AttentionRequest) -> tuple[BackwardConfig, str]:
    """As `_forward_config`, of the backward."""
    shape, deterministic = _padded_shape(request), _deterministic(request)
    memory = shared_memory(request.compute_capability)
    heuristic = functools.partial(
        attention_backward_config.heuristic, shape, memory, bulk=_bulk(request), deterministic=deterministic
    )
    key = tuning.key_of(request, shape, deterministic)
    found, source = tuning.choose(BACKWARD, request.device_kind, key, _settings(request).backward, heuristic)
    return _copying(request, found), source


def _deterministic(request: AttentionRequest) -> bool:
    """Whether dQ has a kernel of its own: where that is asked for, or where nothing else fits into shared memory."""
    given, shape, memory = _settings(request), _padded_shape(request), shared_memory(request.compute_capability)
    if given.deterministic or given.backward is not None or backward(request) != "ampere":
        return given.deterministic
    config = attention_backward_config.heuristic(shape, memory, bulk=_bulk(request))
    return bool(config.refusals(shape, memory, deterministic=False))


def _bulk(request: AttentionRequest) -> bool:
    return _generation(request) >= COPY_ENGINE


def _copying[Config: ForwardConfig | BackwardConfig](request: AttentionRequest, config: Config) -> Config:
    """Settings with the way of copying that the device has."""
    return dataclasses.replace(config, bulk=_bulk(request))
