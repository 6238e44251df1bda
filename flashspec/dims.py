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

Arrays are BTNH and BSKH, as in `jax.nn`. Docstrings give the shapes of public functions in these letters; annotations
of internal ones are jaxtyping's, which the tests check at run time and users do not pay for.
"""
