"""Models that people run, as data: the shapes that their published `config.json` describe."""

from typing import Any

from flashspec.models.config import DecoderConfig
from flashspec.models.families import FAMILIES
from flashspec.models.rotary import LINEAR, LLAMA3, RopeScaling


def _preset(family: str, sizes: tuple[int, int, int, int, int, int, int], **rest: Any) -> DecoderConfig:
    """A member of a family from its sizes in the order of V, hidden, MLP, layers, N, K, H."""
    vocab, hidden, inner, layers, heads, kv_heads, head_dim = sizes
    return DecoderConfig(family, vocab, hidden, inner, layers, heads, kv_heads, head_dim, **rest)


def _llama3(sizes: tuple[int, int, int, int, int, int, int], factor: float | None, **rest: Any) -> DecoderConfig:
    scaling = None if factor is None else RopeScaling(LLAMA3, factor)
    context = 8192 if factor is None else 131072
    shared = {"rope_theta": 5e5, "rms_norm_eps": 1e-5, "bos_token_id": 128000, "eos_token_ids": (128001,)}
    return _preset("llama", sizes, rope_scaling=scaling, max_position_embeddings=context, **shared, **rest)


def _smollm2(sizes: tuple[int, int, int, int, int, int, int], theta: float) -> DecoderConfig:
    ids = {"bos_token_id": 0, "eos_token_ids": (0,)}
    shared = {"rms_norm_eps": 1e-5, "tie_embeddings": True, "max_position_embeddings": 8192}
    return _preset("llama", sizes, rope_theta=theta, **shared, **ids)


def _qwen(family: str, sizes: tuple[int, int, int, int, int, int, int], tied: bool, context: int) -> DecoderConfig:
    ids = {"bos_token_id": 151643, "eos_token_ids": (151643 if family == "qwen2" else 151645,)}
    return _preset(family, sizes, rope_theta=1e6, tie_embeddings=tied, max_position_embeddings=context, **ids)


def _gemma(family: str, sizes: tuple[int, int, int, int, int, int, int], window: int, **rest: Any) -> DecoderConfig:
    every = FAMILIES[family].full_every or 1
    usual = {name: value for name, value in FAMILIES[family].defaults.items() if name != "head_dim"}
    shared = {"full_layers": tuple(range(every - 1, sizes[3], every)), "bos_token_id": 2, "eos_token_ids": (1,)}
    return _preset(family, sizes, **usual | shared | {"sliding_window": window} | rest)


def _gemma3(sizes: tuple[int, int, int, int, int, int, int], **rest: Any) -> DecoderConfig:
    return _gemma(
        "gemma3_text", sizes, 1024, rope_scaling=RopeScaling(LINEAR, 8.0), **{"eos_token_ids": (1, 106)} | rest
    )


PRESETS: dict[str, DecoderConfig] = {
    "llama-2-7b": _preset(
        "llama", (32000, 4096, 11008, 32, 32, 32, 128), rms_norm_eps=1e-5, max_position_embeddings=4096
    ),
    "llama-3-8b": _llama3((128256, 4096, 14336, 32, 32, 8, 128), None),
    "llama-3.1-8b": _llama3((128256, 4096, 14336, 32, 32, 8, 128), 8.0),
    "llama-3.2-1b": _llama3((128256, 2048, 8192, 16, 32, 8, 64), 32.0, tie_embeddings=True),
    "llama-3.2-3b": _llama3((128256, 3072, 8192, 28, 24, 8, 128), 32.0, tie_embeddings=True),
    # Llama 3.2 1B before its context was extended; the shape that kept results name.
    "llama-3-1b-shape": _llama3((128256, 2048, 8192, 16, 32, 8, 64), None, tie_embeddings=True),
    "smollm2-135m": _smollm2((49152, 576, 1536, 30, 9, 3, 64), 1e5),
    "smollm2-360m": _smollm2((49152, 960, 2560, 32, 15, 5, 64), 1e5),
    "smollm2-1.7b": _smollm2((49152, 2048, 8192, 24, 32, 32, 64), 1.3e5),
    "mistral-7b": _preset(
        "mistral",
        (32000, 4096, 14336, 32, 32, 8, 128),
        rms_norm_eps=1e-5,
        sliding_window=4096,
        max_position_embeddings=32768,
    ),
    "qwen2.5-0.5b": _qwen("qwen2", (151936, 896, 4864, 24, 14, 2, 64), True, 32768),
    "qwen2.5-7b": _qwen("qwen2", (152064, 3584, 18944, 28, 28, 4, 128), False, 131072),
    "qwen3-0.6b": _qwen("qwen3", (151936, 1024, 3072, 28, 16, 8, 128), True, 40960),
    "qwen3-8b": _qwen("qwen3", (151936, 4096, 12288, 36, 32, 8, 128), False, 40960),
    "gemma-2-2b": _gemma("gemma2", (256000, 2304, 9216, 26, 8, 4, 256), 4096),
    "gemma-2-9b": _gemma("gemma2", (256000, 3584, 14336, 42, 16, 8, 256), 4096),
    "gemma-2-27b": _gemma("gemma2", (256000, 4608, 36864, 46, 32, 16, 128), 4096, query_pre_attn_scalar=144),
    "gemma-3-270m": _gemma("gemma3_text", (262144, 640, 2048, 18, 4, 1, 256), 512, max_position_embeddings=32768),
    "gemma-3-1b": _gemma("gemma3_text", (262144, 1152, 6912, 26, 4, 1, 256), 512, max_position_embeddings=32768),
    # The text models of checkpoints that also read images, with the end tokens of their instruction-tuned versions.
    "gemma-3-4b": _gemma3((262208, 2560, 10240, 34, 8, 4, 256)),
    "gemma-3-12b": _gemma3((262208, 3840, 15360, 48, 16, 8, 256)),
    "gemma-3-27b": _gemma3((262208, 5376, 21504, 62, 32, 16, 128), query_pre_attn_scalar=168),
}
