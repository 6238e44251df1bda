"""Key/value caches: pure states with one contract, dense, window (ring buffer) and paged."""

from flashspec.cache.base import Cache
from flashspec.cache.dense import DenseCache, dense_cache
from flashspec.cache.operations import append, cache_bytes, rollback, view
from flashspec.cache.paged import PagedCache, paged_cache
from flashspec.cache.rows import replace_rows
from flashspec.cache.window import WindowCache, window_cache

__all__ = [
    "Cache",
    "DenseCache",
    "PagedCache",
    "WindowCache",
    "append",
    "cache_bytes",
    "dense_cache",
    "paged_cache",
    "replace_rows",
    "rollback",
    "view",
    "window_cache",
]
