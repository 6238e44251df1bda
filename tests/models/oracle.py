"""The decoder again, in numpy and float64, from the tensors of a checkpoint and with loops where the library has none.

Written from the papers and Hugging Face's tensor names, it shares nothing with the library. `wrong` plants one bug.
"""

from collections.abc import Mapping

import numpy as np

from flashspec.models import DecoderConfig

# Each with a model that would show it.
WRONG = {
    "interleaved rope": "llama",
    "head n mod K": "llama",
    "eps outside the root": "llama",
    "position off by one": "llama",
    "no scale": "llama",
    "gate and up swapped": "llama",
    "unscaled positions": "llama with scaled positions",
    "no bias": "qwen2",
    "no query and key norms": "qwen3",
    "no window": "mistral",
    "a window on every layer": "gemma 2",
    "no attention cap": "gemma 2",
    "no final cap": "gemma 2",
    "no post norms": "gemma 2",
    "norms without offset": "gemma 2",
    "unscaled embeddings": "gemma 2",
    "scale of the head size": "gemma 2",
    "silu": "gemma 2",
    "one rotary base": "gemma 3",
}

type Tensors = Mapping[str, np.ndarray]


def logits(
    config: DecoderConfig, tensors: Tensors, tokens: np.ndarray, wrong: str | None = None, first_position: int = 0
) -> np.ndarray:
    """Logits [T,V] of one row of tokens [T], whose first sits at `first_position`."""
    tensors = {name: np.asarray(array, np.float64) for name, array in tensors.items()}
    positions = np.arange(len(tokens)) + first_position
    x = tensors["model.embed_tokens.weight"][tokens]
    if is_gemma(config) and wrong != "unscaled embeddings":
        x = x * np.sqrt(config.hidden_size)
    for layer in range(config.num_layers):
        own = {
            name.removeprefix(f"model.layers.{layer}."): array
            for name, array in tensors.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        for branch in (_attention, _mlp):
            before, after = _norms_of(config, branch.__name__)
            added = branch(config, own, _norm(config, x, own[f"{before}.weight"], wrong), positions, layer, wrong)
            if after and wrong != "no post norms":
                added = _norm(config, added, own[f"{after}.weight"], wrong)
            x = x + added
    head = tensors["model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"]
    found = _norm(config, x, tensors["model.norm.weight"], wrong) @ head.T
    cap = None if wrong == "no final cap" else config.final_soft_cap
    return found if cap is None else cap * np.tanh(found / cap)


def is_gemma(config: DecoderConfig) -> bool:
    return config.family.startswith("gemma")


def _norms_of(config: DecoderConfig, branch: str) -> tuple[str, str | None]:
    """The norms before and after a branch."""
    if branch == "_attention":
        return "input_layernorm", "post_attention_layernorm" if is_gemma(config) else None
    if is_gemma(config):
        return "pre_feedforward_layernorm", "post_feedforward_layernorm"
    return "post_attention_layernorm", None


def _norm(config: DecoderConfig, x: np.ndarray, weight: np.ndarray, wrong: str | None) -> np.ndarray:
    if is_gemma(config) and wrong != "norms without offset":
        weight = 1 + weight
    mean = np.mean(x * x, axis=-1, keepdims=True)
    if wrong == "eps outside the root":
        return weight * x / (np.sqrt(mean) + config.rms_norm_eps)
    return weight * x / np.sqrt(mean + config.rms_norm_eps)


def _mlp(
    config: DecoderConfig, own: Tensors, x: np.ndarray, positions: np.ndarray, layer: int, wrong: str | None
) -> np.ndarray:
    gate, up = x @ own["mlp.gate_proj.weight"].T, x @ own["mlp.up_proj.weight"].T
    if wrong == "gate and up swapped":
        gate, up = up, gate
    if is_gemma(config) and wrong != "silu":
        activated = gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) / 2
    else:
        activated = gate / (1 + np.exp(-gate))
    return (activated * up) @ own["mlp.down_proj.weight"].T


def _frequency(config: DecoderConfig, i: int, layer: int, wrong: str | None) -> float:
    """Radians a position of pair i."""
    local = config.local_rope_theta is not None and layer not in config.full_layers
    if local and config.local_rope_theta is not None and wrong != "one rotary base":
        return config.local_rope_theta ** (-2 * i / config.head_dim)
    own, scaling = config.rope_theta ** (-2 * i / config.head_dim), config.rope_scaling
    if scaling is None or wrong == "unscaled positions":
        return own
    if scaling.kind == "linear":
        return own / scaling.factor
    wavelength, context = 2 * np.pi / own, scaling.original_max_position_embeddings
    if wavelength < context / scaling.high_freq_factor:
        return own
    if wavelength > context / scaling.low_freq_factor:
        return own / scaling.factor
    smooth = (context / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - smooth) * own / scaling.factor + smooth * own


def _rope(config: DecoderConfig, x: np.ndarray, position: float, layer: int, wrong: str | None) -> np.ndarray:
    half = config.head_dim // 2
    turned = np.empty_like(x)
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if wrong == "interleaved rope" else (i, i + half)
        angle = position * _frequency(config, i, layer, wrong)
        turned[first] = x[first] * np.cos(angle) - x[second] * np.sin(angle)
        turned[second] = x[second] * np.cos(angle) + x[first] * np.sin(angle)
    return turned


def _first_key(config: DecoderConfig, t: int, layer: int, wrong: str | None) -> int:
    """The first key that query t sees."""
    full = layer in config.full_layers and wrong != "a window on every layer"
    if config.sliding_window is None or full or wrong == "no window":
        return 0
    return max(0, t - config.sliding_window + 1)


def _attention(
    config: DecoderConfig, own: Tensors, x: np.ndarray, positions: np.ndarray, layer: int, wrong: str | None
) -> np.ndarray:
    size = config.head_dim
    query, key, value = (_project(own, role, x, wrong) for role in "qkv")
    scalar = config.query_pre_attn_scalar
    if scalar is None or wrong == "scale of the head size":
        scalar = size
    cap = None if wrong == "no attention cap" else config.attention_soft_cap
    result = np.zeros_like(query)
    for n in range(config.num_heads):
        k = n % config.num_kv_heads if wrong == "head n mod K" else n // (config.num_heads // config.num_kv_heads)
        keys = [
            _placed(config, own, "k", key[s, k * size : (k + 1) * size], positions[s], layer, wrong)
            for s in range(len(x))
        ]
        for t in range(len(x)):
            position = positions[t] + (wrong == "position off by one")
            q = _placed(config, own, "q", query[t, n * size : (n + 1) * size], position, layer, wrong)
            first = _first_key(config, t, layer, wrong)
            scores = np.array([q @ one for one in keys[first : t + 1]]) * (1 if wrong == "no scale" else scalar**-0.5)
            if cap is not None:
                scores = cap * np.tanh(scores / cap)
            weights = np.exp(scores - scores.max())
            result[t, n * size : (n + 1) * size] = (
                weights @ value[first : t + 1, k * size : (k + 1) * size] / weights.sum()
            )
    return result @ own["self_attn.o_proj.weight"].T


def _project(own: Tensors, role: str, x: np.ndarray, wrong: str | None) -> np.ndarray:
    projected = x @ own[f"self_attn.{role}_proj.weight"].T
    bias = own.get(f"self_attn.{role}_proj.bias")
    return projected if bias is None or wrong == "no bias" else projected + bias


def _placed(
    config: DecoderConfig, own: Tensors, role: str, x: np.ndarray, position: float, layer: int, wrong: str | None
) -> np.ndarray:
    """A query or key head, normalised where the family does so, at its position."""
    weight = own.get(f"self_attn.{role}_norm.weight")
    if weight is not None and wrong != "no query and key norms":
        x = _norm(config, x, weight, wrong)
    return _rope(config, x, position, layer, wrong)
