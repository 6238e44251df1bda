"""Launch settings that a caller gives, in the place of an implementation's name.

    dot_product_attention(..., implementation=Hopper(forward=ForwardConfig(block_kv=64)))
    dot_product_attention(..., implementation=(Hopper(deterministic=True), "blockwise"))
    dot_product_attention(..., implementation=Ampere(deterministic=True))

They belong to the call and to nothing around it: a program that was traced with them keeps them, and no other call sees
them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from flashspec.checks import fail, flag
from flashspec.selection import Implementation
from pallas_kernels.gpu.ampere.attention_backward_config import BackwardConfig as AmpereBackwardConfig
from pallas_kernels.gpu.ampere.attention_forward_config import ForwardConfig as AmpereForwardConfig
from pallas_kernels.gpu.hopper.attention_backward_config import BackwardConfig
from pallas_kernels.gpu.hopper.attention_decode_config import DecodeConfig
from pallas_kernels.gpu.hopper.attention_forward_config import ForwardConfig


@dataclasses.dataclass(frozen=True)
class Hopper:
    """The Hopper kernels, with settings of the caller's own where those chosen by shape are not wanted.

    Args:
      forward, backward, decode: launch settings of a kernel; None for the tuned ones, or else the heuristic's. Settings
        that a call cannot have are refused before compute, with every reason.
      deterministic: whether gradients have to be bit-equal from run to run, which takes more time; by default parts of
        the query's gradient are added in whatever order they come.
    """

    name: ClassVar[str] = "hopper"

    forward: ForwardConfig | None = None
    backward: BackwardConfig | None = None
    decode: DecodeConfig | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        kinds = {"forward": ForwardConfig, "backward": BackwardConfig, "decode": DecodeConfig}
        _check(self, {name: (f"a {kind.__name__}", kind) for name, kind in kinds.items()})


@dataclasses.dataclass(frozen=True)
class Ampere:
    """The portable GPU kernels, with settings of the caller's own where those chosen by shape are not wanted.

    Args:
      forward, backward: as in `Hopper`; how tiles are copied, `bulk`, follows from the GPU, whatever they say.
      deterministic: as in `Hopper`.
    """

    name: ClassVar[str] = "ampere"

    forward: AmpereForwardConfig | None = None
    backward: AmpereBackwardConfig | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        kinds = {"forward": AmpereForwardConfig, "backward": AmpereBackwardConfig}
        _check(self, {name: (f"an Ampere{kind.__name__}", kind) for name, kind in kinds.items()})


type Settings = Hopper | Ampere
type AttentionImplementation = str | Settings | Sequence[str | Settings] | None


def _check(settings: Any, kinds: Mapping[str, tuple[str, type]]) -> None:
    for name, (text, kind) in kinds.items():
        given = getattr(settings, name)
        if given is not None and not isinstance(given, kind):
            raise fail(name, f"{text} or None", repr(given))
    flag("deterministic", settings.deterministic)


def split(implementation: AttentionImplementation) -> tuple[Implementation, tuple[Settings, ...]]:
    """Names alone, and the settings that were given among them.

    Raises:
      ValueError: kernels with settings are named more than once, so that it is open which settings are meant.
    """
    if isinstance(implementation, Hopper | Ampere):
        return implementation.name, (implementation,)
    if isinstance(implementation, str) or not isinstance(implementation, Sequence):
        return implementation, ()
    given = tuple(entry for entry in implementation if isinstance(entry, Hopper | Ampere))
    names: Any = tuple(entry.name if isinstance(entry, Hopper | Ampere) else entry for entry in implementation)
    for settings in given:
        if names.count(settings.name) > 1:
            kernels = f"the {type(settings).__name__} kernels"
            raise fail("implementation", f"{kernels} at most once where settings are given", repr(implementation))
    return names, given


def settings_of[Kind: Hopper | Ampere](given: Sequence[Settings], kind: type[Kind]) -> Kind:
    """Those of one kind among the settings that were given; its defaults where there are none."""
    return next((settings for settings in given if isinstance(settings, kind)), kind())
