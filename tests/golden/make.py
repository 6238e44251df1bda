"""Makes the golden files: tiny random models of every family, run by Hugging Face's `transformers` in float32.

    python -m venv golden && golden/bin/python -m pip install torch transformers
    golden/bin/python tests/golden/make.py [NAME ...]

Each folder gets `config.json` and `model.safetensors` as that library writes them (weights that bfloat16 holds
exactly), and `golden.npz` with tokens and logits: of whole rows, of rows that are padded, and of rows at late
positions. Before a file is written the library's own decoding over its cache, token by token, has to agree with its
whole forward.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import (
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

FOLDER = Path(__file__).parent
TOKENS, SHORT, LATE = 20, 11, 600
SIZES = {
    "vocab_size": 44,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 20.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
}
LARGE_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
}
GEMMA3 = SIZES | {
    "num_hidden_layers": 4,
    "sliding_window": 6,
    "query_pre_attn_scalar": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "vision_use_head": False,
}
ROPE = {"rope_type": "default", "rope_theta": 100.0}
CONFIGS = {
    "llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3, rms_norm_eps=1e-3),
    "smollm2": LlamaConfig(
        **SIZES | {"num_attention_heads": 3, "num_key_value_heads": 1}, rope_parameters=ROPE, tie_word_embeddings=True
    ),
    "mistral": MistralConfig(**SIZES, rope_parameters=ROPE, sliding_window=6),
    "qwen2": Qwen2Config(
        **{name: size for name, size in SIZES.items() if name != "head_dim"} | {"hidden_size": 32},
        rope_parameters=ROPE,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
    ),
    "qwen3": Qwen3Config(**SIZES, rope_parameters=ROPE, rms_norm_eps=1e-3),
    "gemma2": Gemma2Config(**SIZES, rope_parameters=ROPE, sliding_window=6, query_pre_attn_scalar=5),
    "gemma3": Gemma3TextConfig(**GEMMA3, rope_parameters=GEMMA3_ROPE),
    "gemma3_with_images": Gemma3Config(
        text_config=GEMMA3 | {"rope_parameters": LARGE_GEMMA3_ROPE},
        vision_config=VISION,
        mm_tokens_per_image=4,
        boi_token_index=41,
        eoi_token_index=42,
        image_token_index=43,
    ),
}


def random_model(config: PreTrainedConfig) -> torch.nn.Module:
    """A model whose every parameter matters, in float32, of numbers that bfloat16 holds."""
    kind = (
        transformers.AutoModelForImageTextToText
        if hasattr(config, "vision_config")
        else transformers.AutoModelForCausalLM
    )
    model = kind.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_weight = parameter.ndim > 1
            values = 1.3 * parameter.shape[-1] ** -0.5 * noise if is_weight else parameter + 0.3 * noise
            parameter.copy_(values.to(torch.bfloat16).float())
    return model


def whole(model: torch.nn.Module, tokens: torch.Tensor, start: int = 0) -> np.ndarray:
    """Logits of rows in one forward, the first token at position `start`."""
    positions = torch.arange(start, start + tokens.shape[1])[None].expand(tokens.shape)
    return model(tokens, position_ids=positions, use_cache=False).logits.numpy()


def by_token(model: torch.nn.Module, tokens: torch.Tensor) -> np.ndarray:
    """Logits of rows one token at a time, over the library's cache."""
    cache, parts = None, []
    for t in range(tokens.shape[1]):
        result = model(tokens[:, t : t + 1], past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        parts.append(result.logits)
    return torch.cat(parts, dim=1).numpy()


def padded(model: torch.nn.Module, tokens: torch.Tensor) -> np.ndarray:
    """Logits where the second row ends after `SHORT` tokens and padding follows."""
    mask = torch.ones_like(tokens)
    mask[1, SHORT:] = 0
    return model(tokens * mask, attention_mask=mask, use_cache=False).logits.numpy()


def assert_close(got: np.ndarray, wanted: np.ndarray) -> None:
    """The tolerance that the library's own two ways have to keep: a tenth of what ours is held to."""
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


@torch.no_grad()
def make(name: str, config: PreTrainedConfig) -> None:
    model, folder = random_model(config), FOLDER / name
    ids = min(config.get_text_config().vocab_size, getattr(config, "boi_token_index", 44))  # no image in the text
    tokens = torch.randint(0, ids, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    logits, with_padding = whole(model, tokens), padded(model, tokens)
    assert_close(by_token(model, tokens), logits)
    assert_close(with_padding[1, :SHORT], logits[1, :SHORT])
    late = whole(model, tokens, LATE)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(
        folder / "golden.npz",
        tokens=tokens.numpy().astype(np.int32),
        short=np.int32(SHORT),
        logits=logits,
        padded=with_padding[1, :SHORT],
        late=late[:1],
        late_start=np.int32(LATE),
        transformers=transformers.__version__,
    )


if __name__ == "__main__":
    for name in sys.argv[1:] or CONFIGS:
        make(name, CONFIGS[name])
        print(name, sum(path.stat().st_size for path in (FOLDER / name).iterdir()))
