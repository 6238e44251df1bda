"""The alphabet of dimensions, and the array types that are spelled with it.

| letter | meaning                                             |
|--------|-----------------------------------------------------|
| B      | batch (rows, independent sequences)                 |
| T      | new (query) positions                               |
| S      | key positions                                       |
| N      | query heads                                         |
| K      | key/value heads; query head n reads head n // G     |
| G      | query heads per key/value head, N // K              |
| H      | key head size                                       |
| Hv     | value head size                                     |
| V      | vocabulary                                          |
| D      | draft tokens in one speculative round               |
| P      | prompt length                                       |

The types are annotations for *internal* functions: the test suite checks them at run time, users pay nothing.
Public entry points take plain arrays, check them with `flashspec.checks`, and give the shapes in their docstrings.
"""

from jaxtyping import Array, Bool, Float, Int

BTNH = Float[Array, "B T N H"]
BTNHv = Float[Array, "B T N Hv"]
BSKH = Float[Array, "B S K H"]
BSKHv = Float[Array, "B S K Hv"]
BTN = Float[Array, "B T N"]
BTNBool = Bool[Array, "B T N"]
BTV = Float[Array, "B T V"]
BV = Float[Array, "B V"]
BDV = Float[Array, "B D V"]
BT = Int[Array, "B T"]
BD = Int[Array, "B D"]
B = Int[Array, " B"]
BBool = Bool[Array, " B"]
