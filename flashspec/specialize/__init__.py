"""Programs for a few fixed shapes: which shapes to compile for, and what padding up to them costs (section 33.4)."""

from flashspec.specialize.buckets import (
    ShapeBuckets,
    bucket_tradeoff,
    expected_extra_area,
    expected_padding,
    optimal_buckets,
)
from flashspec.specialize.decision import Decision, should_precompile
from flashspec.specialize.executables import use_persistent_cache
from flashspec.specialize.ledger import BucketEntry, Ledger
from flashspec.specialize.wrapper import Specialized, specialize

__all__ = [
    "BucketEntry",
    "Decision",
    "Ledger",
    "ShapeBuckets",
    "Specialized",
    "bucket_tradeoff",
    "expected_extra_area",
    "expected_padding",
    "optimal_buckets",
    "should_precompile",
    "specialize",
    "use_persistent_cache",
]
