"""The operands of a call: bound to the function's parameters, flat, each with the axis that is padded."""

import dataclasses
import inspect
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from flashspec.checks import fail, is_concrete
from flashspec.specialize import padding
from flashspec.specialize.executables import trace_settings

type Operands = tuple[tuple[Any, ...], dict[str, Any]]  # positional and by keyword


@dataclasses.dataclass(frozen=True)
class Call:
    """The operands of one call, flat, with the axis that is padded in each."""

    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    axes: tuple[int | None, ...]
    treedef: Any  # of (positional, keywords)
    length: int

    def padded(self, bound: int, fill: Callable[[Any], Any] = lambda dtype: 0) -> Operands:
        """The operands of the bucket's executable."""
        leaves = [
            leaf if axis is None else padding.pad(name, leaf, axis, bound, fill(leaf.dtype))
            for name, leaf, axis in zip(self.names, self.leaves, self.axes, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, leaves)

    def shapes(self, bound: int) -> Operands:
        """Their shapes."""
        return jax.tree.unflatten(self.treedef, self._structs(bound))

    def key(self, bound: int) -> Hashable:
        """All that the bucket's executable depends on; the bound comes first."""
        kinds = tuple((s.shape, s.dtype, s.weak_type, s.sharding) for s in self._structs(bound))
        return bound, self.treedef, kinds, trace_settings()

    def _structs(self, bound: int) -> list[jax.ShapeDtypeStruct]:
        return [_struct(leaf, axis, bound) for leaf, axis in zip(self.leaves, self.axes, strict=True)]


def _struct(leaf: Any, axis: int | None, bound: int) -> jax.ShapeDtypeStruct:
    kind = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    shape = kind.shape if axis is None else (*kind.shape[:axis], bound, *kind.shape[axis + 1 :])
    sharding = leaf.sharding if padding.is_placed(leaf) else None
    return jax.ShapeDtypeStruct(shape, kind.dtype, sharding=sharding, weak_type=kind.weak_type)


class Parameters:
    """The parameters of a function, with the axes to pad in each and the one that takes the length."""

    def __init__(self, fn: Callable[..., Any], in_axes: padding.Axes, length_arg: str | int | None) -> None:
        self.signature = inspect.signature(fn)
        self.length_arg = _length_parameter(self.signature, length_arg)
        self.axes = _axes_by_name(self.signature, self.length_arg, in_axes)
        others = [p for name, p in self.signature.parameters.items() if name != self.length_arg]
        self.without_length = self.signature.replace(parameters=others)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The operands of a call, with the length put in where the caller left it out."""
        arguments = self._arguments(args, kwargs)
        unsaid = [] if self.length_arg is None or self.length_arg in arguments else [self.length_arg]
        arguments |= {name: np.zeros((), np.int32) for name in unsaid}  # the value follows
        bound = inspect.BoundArguments(self.signature, arguments)
        axes = inspect.BoundArguments(self.signature, {name: self.axes[name] for name in arguments})
        flat, treedef = jax.tree_util.tree_flatten_with_path((bound.args, bound.kwargs))
        wanted = padding.axis_of_each_leaf("in_axes", (axes.args, axes.kwargs), (bound.args, bound.kwargs))
        names = [self._name(path) for path, _ in flat]
        leaves = [_operand(name, leaf) for name, (_, leaf) in zip(names, flat, strict=True)]
        ranked = [
            None if axis is None else padding.from_left(name, axis, np.shape(leaf))
            for name, leaf, axis in zip(names, leaves, wanted, strict=True)
        ]
        sizes = {n: leaf.shape[a] for n, leaf, a in zip(names, leaves, ranked, strict=True) if a is not None}
        length = padding.common_length(sizes)
        leaves = [np.asarray(length, np.int32) if n in unsaid else leaf for n, leaf in zip(names, leaves, strict=True)]
        return Call(tuple(leaves), tuple(names), tuple(ranked), treedef, length)

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Arguments by parameter. Positional ones pass over the length's parameter, unless they fill all of them."""
        if len(args) > len(self.without_length.parameters):
            return self.signature.bind(*args, **kwargs).arguments
        lengths = {name: value for name, value in kwargs.items() if name == self.length_arg}
        others = {name: value for name, value in kwargs.items() if name not in lengths}
        return self.without_length.bind(*args, **others).arguments | lengths

    def _name(self, path: tuple[Any, ...]) -> str:
        """The parameter, and the place in its tree."""
        part, place, *rest = path
        name = list(self.signature.parameters)[place.idx] if part.idx == 0 else place.key
        return f"{name}{jax.tree_util.keystr(tuple(rest))}"


def _operand(name: str, leaf: Any) -> Any:
    """The leaf if it can be an operand of a program."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if not is_concrete(leaf):
        raise fail(name, "a concrete array (inside of `jax.jit` call the function itself)", "a traced array")
    try:
        jax.typeof(leaf)
    except TypeError as error:
        raise fail(name, "an array (bind what is static with functools.partial)", type(leaf).__name__) from error
    return leaf


def _length_parameter(signature: inspect.Signature, length_arg: str | int | None) -> str | None:
    """The name of the parameter that takes the length."""
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        raise fail("fn", "a function whose parameters all have names", f"the signature {signature}")
    names = list(signature.parameters)
    if isinstance(length_arg, int) and not isinstance(length_arg, bool) and 0 <= length_arg < len(names):
        return names[length_arg]
    if length_arg is not None and length_arg not in names:
        raise fail("length_arg", f"a parameter of the function, out of {names}", repr(length_arg))
    return length_arg


def _axes_by_name(signature: inspect.Signature, length_arg: str | None, in_axes: padding.Axes) -> dict[str, Any]:
    """The axes of each parameter's argument; None for the length's."""
    names = list(signature.parameters)
    others = [name for name in names if name != length_arg]
    if isinstance(in_axes, dict):
        if not set(in_axes) <= set(others):
            raise fail("in_axes", f"names out of {others}", sorted(in_axes))
        given = in_axes
    elif isinstance(in_axes, tuple | list):
        if len(in_axes) not in (len(others), len(names)):
            raise fail("in_axes", f"{len(others)} entries, one for each of {others}", f"{len(in_axes)}")
        given = dict(zip(others if len(in_axes) == len(others) else names, in_axes, strict=True))
    else:
        given = dict.fromkeys(others, in_axes)
    if length_arg is not None and given.get(length_arg) is not None:
        raise fail("in_axes", f"None for the length `{length_arg}`", given[length_arg])
    return dict.fromkeys(names) | given
