"""Exact attention: one call, several implementations, and a plan that says which one runs and why."""

from flashspec.attention.api import attention_stats, dot_product_attention, plan_attention
from flashspec.attention.cascade import cascade_attention
from flashspec.attention.decode import cached_attention, decode_attention, decode_stats
from flashspec.attention.decode_plan import plan_decode
from flashspec.attention.plan import AttentionPlan
from flashspec.attention.request import AttentionRequest
from flashspec.attention.settings import (
    Ampere,
    AmpereBackwardConfig,
    AmpereForwardConfig,
    BackwardConfig,
    DecodeConfig,
    ForwardConfig,
    Hopper,
)
from flashspec.attention.views import DenseView, PagedView, WindowView
from flashspec.masks import Contiguous
from flashspec.online_softmax import SoftmaxStats, finalize, merge, merge_across, merge_axis

__all__ = [
    "Ampere",
    "AmpereBackwardConfig",
    "AmpereForwardConfig",
    "AttentionPlan",
    "AttentionRequest",
    "BackwardConfig",
    "Contiguous",
    "DecodeConfig",
    "DenseView",
    "ForwardConfig",
    "Hopper",
    "PagedView",
    "SoftmaxStats",
    "WindowView",
    "attention_stats",
    "cached_attention",
    "cascade_attention",
    "decode_attention",
    "decode_stats",
    "dot_product_attention",
    "finalize",
    "merge",
    "merge_across",
    "merge_axis",
    "plan_attention",
    "plan_decode",
]
