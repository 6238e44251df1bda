"""Programs for a few fixed shapes: which shapes to compile for, and what padding up to them costs (section 33.4)."""

from flashspec.specialize.buckets import (
    ShapeBuckets,
    bucket_tradeoff,
    expected_extra_area,
    expected_padding,
    optimal_buckets,
)

__all__ = [
    "ShapeBuckets",
    "bucket_tradeoff",
    "expected_extra_area",
    "expected_padding",
    "optimal_buckets",
]
