"""Launch settings that a caller gives, in the place of an implementation's name.

    dot_product_attention(..., implementation=Hopper(forward=ForwardConfig(block_kv=64)))
    dot_product_attention(..., implementation=(Hopper(deterministic=True), "blockwise"))

They belong to the call and to nothing around it: a program that was traced with them keeps them, and no other call sees
them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from flashspec.checks import fail, flag
from flashspec.selection import Implementation
from pallas_kernels.gpu.hopper.attention_backward_config import BackwardConfig
from pallas_kernels.gpu.hopper.attention_decode_config import DecodeConfig
from pallas_kernels.gpu.hopper.attention_forward_config import ForwardConfig

NAME = "hopper"


@dataclasses.dataclass(frozen=True)
class Hopper:
    """The Hopper kernels, with settings of the caller's own where those chosen by shape are not wanted.

    Args:
      forward, backward, decode: launch settings of a kernel; None for the tuned ones, or else the heuristic's. Settings
        that a call cannot have are refused before compute, with every reason.
      deterministic: whether gradients have to be bit-equal from run to run, which takes more time; by default parts of
        the query's gradient are added in whatever order they come.
    """

    forward: ForwardConfig | None = None
    backward: BackwardConfig | None = None
    decode: DecodeConfig | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        kinds = {"forward": ForwardConfig, "backward": BackwardConfig, "decode": DecodeConfig}
        for name, kind in kinds.items():
            given: Any = getattr(self, name)
            if given is not None and not isinstance(given, kind):
                raise fail(name, f"a {kind.__name__} or None", repr(given))
        flag("deterministic", self.deterministic)


type AttentionImplementation = str | Hopper | Sequence[str | Hopper] | None


def split(implementation: AttentionImplementation) -> tuple[Implementation, Hopper | None]:
    """Names alone, and the settings that were given among them.

    Raises:
      ValueError: the Hopper kernels are named more than once, so that it is open which settings are meant.
    """
    if isinstance(implementation, Hopper):
        return NAME, implementation
    if isinstance(implementation, str) or not isinstance(implementation, Sequence):
        return implementation, None
    own = [entry for entry in implementation if isinstance(entry, Hopper)]
    names: Any = tuple(NAME if isinstance(entry, Hopper) else entry for entry in implementation)
    if own and names.count(NAME) > 1:
        raise fail("implementation", "the Hopper kernels at most once where settings are given", repr(implementation))
    return names, own[0] if own else None
