"""The decoder again, in numpy and float64, from the tensors of a checkpoint and with loops where the library has none.

Written from the papers and Hugging Face's tensor names, it shares nothing with the library. `wrong` plants one bug.
"""

from collections.abc import Mapping

import numpy as np

from flashspec.models import DecoderConfig

WRONG = (
    "interleaved rope",
    "head n mod K",
    "eps outside the root",
    "position off by one",
    "no scale",
    "gate and up swapped",
)

type Tensors = Mapping[str, np.ndarray]


def logits(
    config: DecoderConfig, tensors: Tensors, tokens: np.ndarray, wrong: str | None = None, first_position: int = 0
) -> np.ndarray:
    """Logits [T,V] of one row of tokens [T], whose first sits at `first_position`."""
    tensors = {name: np.asarray(array, np.float64) for name, array in tensors.items()}
    positions = np.arange(len(tokens)) + first_position
    x = tensors["model.embed_tokens.weight"][tokens]
    for layer in range(config.num_layers):
        own = {
            name.removeprefix(f"model.layers.{layer}."): array
            for name, array in tensors.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        x = x + _attention(config, own, _norm(config, x, own["input_layernorm.weight"], wrong), positions, wrong)
        x = x + _mlp(own, _norm(config, x, own["post_attention_layernorm.weight"], wrong), wrong)
    head = tensors["model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"]
    return _norm(config, x, tensors["model.norm.weight"], wrong) @ head.T


def _norm(config: DecoderConfig, x: np.ndarray, weight: np.ndarray, wrong: str | None) -> np.ndarray:
    mean = np.mean(x * x, axis=-1, keepdims=True)
    if wrong == "eps outside the root":
        return weight * x / (np.sqrt(mean) + config.rms_norm_eps)
    return weight * x / np.sqrt(mean + config.rms_norm_eps)


def _mlp(own: Tensors, x: np.ndarray, wrong: str | None) -> np.ndarray:
    gate, up = x @ own["mlp.gate_proj.weight"].T, x @ own["mlp.up_proj.weight"].T
    if wrong == "gate and up swapped":
        gate, up = up, gate
    return (gate / (1 + np.exp(-gate)) * up) @ own["mlp.down_proj.weight"].T


def _rope(config: DecoderConfig, x: np.ndarray, position: float, wrong: str | None) -> np.ndarray:
    half = config.head_dim // 2
    turned = np.empty_like(x)
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if wrong == "interleaved rope" else (i, i + half)
        angle = position * config.rope_theta ** (-2 * i / config.head_dim)
        turned[first] = x[first] * np.cos(angle) - x[second] * np.sin(angle)
        turned[second] = x[second] * np.cos(angle) + x[first] * np.sin(angle)
    return turned


def _attention(
    config: DecoderConfig, own: Tensors, x: np.ndarray, positions: np.ndarray, wrong: str | None
) -> np.ndarray:
    size = config.head_dim
    query, key, value = (x @ own[f"self_attn.{role}_proj.weight"].T for role in "qkv")
    result = np.zeros_like(query)
    for n in range(config.num_heads):
        k = n % config.num_kv_heads if wrong == "head n mod K" else n // (config.num_heads // config.num_kv_heads)
        for t in range(len(x)):
            q = _placed(config, own, "q", query[t, n * size : (n + 1) * size], positions[t], wrong)
            first = 0 if config.sliding_window is None else max(0, t - config.sliding_window + 1)
            keys = [
                _placed(
                    config,
                    own,
                    "k",
                    key[s, k * size : (k + 1) * size],
                    positions[s] - (wrong == "position off by one"),
                    wrong,
                )
                for s in range(first, t + 1)
            ]
            scores = np.array([q @ one for one in keys]) * (1 if wrong == "no scale" else size**-0.5)
            weights = np.exp(scores - scores.max())
            result[t, n * size : (n + 1) * size] = (
                weights @ value[first : t + 1, k * size : (k + 1) * size] / weights.sum()
            )
    return result @ own["self_attn.o_proj.weight"].T


def _placed(
    config: DecoderConfig, own: Tensors, role: str, x: np.ndarray, position: float, wrong: str | None
) -> np.ndarray:
    """A query or key head, normalised where the family does so, at its position."""
    if config.qk_norm:
        x = _norm(config, x, own[f"self_attn.{role}_norm.weight"], wrong)
    return _rope(config, x, position, wrong)
