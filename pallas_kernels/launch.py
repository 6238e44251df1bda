"""Arithmetic of launch grids, in Python integers."""


def cdiv(a: int, b: int) -> int:
    """The least integer of at least a / b, for b > 0: how many blocks of b cover a."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """The least multiple of `multiple` (> 0) of at least a."""
    return cdiv(a, multiple) * multiple
