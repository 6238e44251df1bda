"""Hugging Face's `generate` on the same weights, where torch and transformers are installed: our speed as a ratio.

Nothing here needs jax: weights come as arrays by their names in a checkpoint, as `flashspec.models.checkpoint.
stored_tensors` gives them, with the `config.json` that belongs to them.
"""

import dataclasses
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

NEEDED = ("torch", "transformers")
EAGER, STATIC, ASSISTED = "eager", "static cache, compiled", "assisted"
NOT_COMPILED = "static cache, not compiled"  # what transformers makes of it on a CPU


def missing() -> str | None:
    """Which of the packages are not installed, in words; None where all are."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed: no comparison with Hugging Face's generate" if absent else None


@dataclasses.dataclass(frozen=True)
class Timing:
    """One way of generating.

    Attributes:
      way: `EAGER`, `STATIC`, `NOT_COMPILED` or `ASSISTED`.
      seconds_per_token: (total - first) / (n - 1), medians of interleaved repeats, by the host's clock.
      tokens: n, new tokens of a row.
      same: whether its greedy tokens are those of `EAGER`, in 16 bits not to be expected of all of them.
    """

    way: str
    seconds_per_token: float
    tokens: int
    same: bool


def load(values: Mapping[str, Any], tensors: Iterable[tuple[str, np.ndarray]], device: str, attention: str) -> Any:
    """A model of transformers with given weights.

    Args:
      values: of `config.json`.
      tensors: (name, array) of every parameter, as stored; a tied head may be left out.
      device: of torch, such as "cuda".
      attention: its implementation there, such as "sdpa".

    Raises:
      ValueError: a tensor is missing, or is none of the model's.
    """
    import torch
    import transformers

    settings = dict(values)
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.eos_token_id = config.pad_token_id = None  # every run has its full length
    dtype = getattr(torch, str(values.get("torch_dtype", "float32")))
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    held = dict(model.named_parameters())
    given = set()
    with torch.no_grad():
        for name, array in tensors:
            if name not in held:
                raise ValueError(f"`tensors`: expected parameters of {type(model).__name__}, got {name}")
            held[name].copy_(_torch(array))
            given.add(name)
    if held.keys() - given:
        raise ValueError(f"`tensors`: expected all parameters, {sorted(held.keys() - given)[:4]} are missing")
    return model.eval()


def _torch(array: np.ndarray) -> Any:
    """The array as a tensor of the same numbers."""
    import torch

    array = np.ascontiguousarray(array)
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Float32 logits [B, T, V] of one forward over tokens [B, T]: what ours are checked against before any time."""
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens).long().to(model.device), use_cache=False).logits.float().cpu().numpy()


def time_generate(
    model: Any,
    prompt: np.ndarray,
    new_tokens: int,
    *,
    assistant: Any = None,
    draft_length: int = 4,
    repeats: int = 3,
    ways: Sequence[str] = (EAGER, STATIC, ASSISTED),
    compile_anywhere: bool = False,
) -> list[Timing]:
    """Greedy generation after a prompt, each way in turn.

    Args:
      model: from `load`.
      prompt: [B, P] int32.
      new_tokens: n, at least 2.
      assistant: a draft model from `load`, or None; assisted generation serves B = 1 only.
      draft_length: tokens that the assistant drafts in a round, always.
      repeats: timed runs of each way, after two that compile and record.
      ways: of `EAGER`, `STATIC`, `ASSISTED`; the last is left out without an assistant, and for B > 1.
      compile_anywhere: compile on devices too for which transformers does not by itself, such as a CPU.

    Returns:
      A timing for each way.
    """
    import torch

    ids = torch.from_numpy(prompt).long().to(model.device)
    chosen = [way for way in ways if way != ASSISTED or (assistant is not None and len(prompt) == 1)]
    options = {way: _options(way, assistant, draft_length, compile_anywhere) for way in chosen}

    def generate(way: str, count: int) -> tuple[float, np.ndarray]:
        _synchronize(model)
        start = time.perf_counter()
        with torch.no_grad():
            done = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                **options[way],
            )
        _synchronize(model)
        return time.perf_counter() - start, done[:, ids.shape[1] :].cpu().numpy()

    tokens = {}
    for way in chosen:
        for _ in range(2):  # the first compiles, the second may record a graph
            tokens[way] = generate(way, new_tokens)[1]
            generate(way, 1)
    turns = [{(way, n): generate(way, n)[0] for way in chosen for n in (1, new_tokens)} for _ in range(repeats)]
    compiles = compile_anywhere or model.device.type != "cpu"
    median = {case: statistics.median(turn[case] for turn in turns) for case in turns[0]}
    return [
        Timing(
            NOT_COMPILED if way == STATIC and not compiles else way,
            (median[way, new_tokens] - median[way, 1]) / (new_tokens - 1),
            new_tokens,
            bool(np.array_equal(tokens[way], tokens[chosen[0]])),
        )
        for way in chosen
    ]


def _options(way: str, assistant: Any, draft_length: int, compile_anywhere: bool) -> dict[str, Any]:
    """What `generate` is told for one way."""
    import transformers

    if way == STATIC:
        compiling = transformers.CompileConfig()
        compiling._compile_all_devices = compile_anywhere
        return {"cache_implementation": "static", "compile_config": compiling}
    if way == ASSISTED:
        drafting = assistant.generation_config
        drafting.num_assistant_tokens, drafting.num_assistant_tokens_schedule = draft_length, "constant"
        drafting.assistant_confidence_threshold = 0.0
        return {"assistant_model": assistant}
    return {}


def _synchronize(model: Any) -> None:
    import torch

    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def compare(
    ours: Mapping[str, float],
    values: Mapping[str, Any],
    tensors: Iterable[tuple[str, np.ndarray]],
    prompt: np.ndarray,
    new_tokens: int,
    *,
    wanted: np.ndarray | None = None,
    tolerance: float = 0.05,
    draft: tuple[Mapping[str, Any], Iterable[tuple[str, np.ndarray]]] | None = None,
    draft_length: int = 4,
    repeats: int = 3,
    device: str | None = None,
    say: Callable[[str], object] = print,
) -> list[list[Any]]:
    """Rows of a table: Hugging Face's ways beside ours on the same weights, in one run.

    Args:
      ours: seconds a later token of our own ways, such as {"plain": 4.3e-3, "speculative": 2.1e-3}.
      values, tensors: `config.to_hf("bfloat16")` and `stored_tensors(config, params)` of the target.
      prompt: [B, P] int32.
      new_tokens: n.
      wanted: our logits over the prompt or its beginning, [B, at most P, V]; they have to agree before a ratio is
        stated.
      tolerance: of the largest logit's magnitude, for 16 bits.
      draft: values and tensors of a draft model, for assisted generation.
      draft_length: D.
      repeats: of each way.
      device: of torch; "cuda" where there is one.
      say: told why there is nothing to compare with.

    Returns:
      [way, ms a token, tokens a second, then for each of ours its tokens a second over that]; none where torch or
      transformers is not installed, or where the logits differ, which is said.
    """
    absent = missing()
    if absent is not None:
        say(absent)
        return []
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = load(values, tensors, device, "sdpa")
    if wanted is not None:
        theirs = logits(model, prompt[:, : wanted.shape[1]])
        apart = float(np.abs(theirs - wanted).max() / np.abs(wanted).max())
        say(
            f"Hugging Face's logits over the prompt differ from ours by {apart:.2g} of the largest, {tolerance} allowed"
        )
        if not apart <= tolerance:
            return []
    assistant = None if draft is None else load(*draft, device, "sdpa")
    timings = time_generate(model, prompt, new_tokens, assistant=assistant, draft_length=draft_length, repeats=repeats)
    return rows(timings, ours, len(prompt))


def rows(timings: Iterable[Timing], ours: Mapping[str, float], batch: int) -> list[list[Any]]:
    """Lines of a table: each way's time a token, its tokens a second, and ours over those."""
    return [
        [
            one.way,
            1e3 * one.seconds_per_token,
            batch / one.seconds_per_token,
            *(one.seconds_per_token / seconds for seconds in ours.values()),
        ]
        for one in timings
    ]
