"""flashspec: exact inference optimisation in JAX.

Attention over the monoid of softmax statistics, key/value caches as pure states, sampling, speculative decoding as one
compiled loop, executables for a few shapes. Models, costs and measurements are in `flashspec.models`,
`flashspec.costs`, `flashspec.measure`.
"""

from flashspec.attention import (
    AttentionPlan,
    Contiguous,
    SoftmaxStats,
    attention_stats,
    cached_attention,
    cascade_attention,
    decode_attention,
    dot_product_attention,
    finalize,
    merge,
    merge_across,
    merge_axis,
    plan_attention,
    plan_decode,
)
from flashspec.cache import append, cache_bytes, dense_cache, paged_cache, rollback, view, window_cache
from flashspec.fusion import EpiloguePlan, matmul_epilogue, plan_matmul_epilogue
from flashspec.generate import BucketedGenerate, Generation, generate, generate_stream
from flashspec.language_model import LanguageModel
from flashspec.recording import loop_compiler_options
from flashspec.sampling import SamplingParams, probabilities
from flashspec.specialize import (
    ShapeBuckets,
    expected_extra_area,
    expected_padding,
    optimal_buckets,
    should_precompile,
    specialize,
)
from flashspec.speculative import (
    ModelDrafter,
    NgramDrafter,
    ShallowDrafter,
    acceptance_probability,
    acceptance_rate,
    init_state,
    output_law,
    residual_distribution,
    round_step,
    speculative_trace,
    verify_chain,
    verify_greedy,
    verify_match,
)
from flashspec.version import __version__

__all__ = [
    "AttentionPlan",
    "BucketedGenerate",
    "Contiguous",
    "EpiloguePlan",
    "Generation",
    "LanguageModel",
    "ModelDrafter",
    "NgramDrafter",
    "SamplingParams",
    "ShallowDrafter",
    "ShapeBuckets",
    "SoftmaxStats",
    "__version__",
    "acceptance_probability",
    "acceptance_rate",
    "append",
    "attention_stats",
    "cache_bytes",
    "cached_attention",
    "cascade_attention",
    "decode_attention",
    "dense_cache",
    "dot_product_attention",
    "expected_extra_area",
    "expected_padding",
    "finalize",
    "generate",
    "generate_stream",
    "init_state",
    "loop_compiler_options",
    "matmul_epilogue",
    "merge",
    "merge_across",
    "merge_axis",
    "optimal_buckets",
    "output_law",
    "paged_cache",
    "plan_attention",
    "plan_decode",
    "plan_matmul_epilogue",
    "probabilities",
    "residual_distribution",
    "rollback",
    "round_step",
    "should_precompile",
    "specialize",
    "speculative_trace",
    "verify_chain",
    "verify_greedy",
    "verify_match",
    "view",
    "window_cache",
]
