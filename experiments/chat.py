"""Chat templates: the text that a model was trained to see around a user's words, from a checkpoint's own files.

A template is a Jinja program, and comes from whoever made the checkpoint. It runs in Jinja's immutable sandbox, with
plain data only: it can read no file, import nothing and change nothing; a template that asks for more is an error.
"""

import datetime
import json
from pathlib import Path
from typing import Any, NoReturn

from flashspec.checks import fail
from flashspec.models.tensor_files import read_json

CONFIG, TEMPLATE, GENERATION = "tokenizer_config.json", "chat_template.jinja", "generation_config.json"


def read_template(directory: Path) -> str | None:
    """The chat template of a checkpoint directory; None if it has none.

    Raises:
      ValueError: `tokenizer_config.json` is malformed, or holds several templates and none called "default".
    """
    path = directory / TEMPLATE
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    path = directory / CONFIG
    template = read_json(path).get("chat_template") if path.is_file() else None
    if isinstance(template, list):  # several, each with a name
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default", NotImplemented)
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{path}: expected one chat_template, or several with one called 'default'; use --no-chat")
    return template


def special_tokens(directory: Path) -> dict[str, str]:
    """Texts of the special tokens that templates name, such as `bos_token`."""
    path = directory / CONFIG
    values = read_json(path) if path.is_file() else {}
    tokens = {name: value for name, value in values.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def render(template: str, directory: Path, prompt: str, system: str | None = None) -> str:
    """A prompt as one user message, with what the template puts before and after it, ready for the model's answer.

    Args:
      template: of `read_template`.
      directory: of the checkpoint, for its special tokens and for messages.
      prompt: the user's words.
      system: instructions ahead of them, where the template knows such messages.

    Returns:
      The text; it holds its own special tokens.

    Raises:
      ValueError: the template fails, or asks for what the sandbox does not give.
      NotImplementedError: Jinja is not installed.
    """
    try:
        import jinja2
        import jinja2.sandbox
    except ImportError as error:
        raise NotImplementedError("chat templates need jinja2 >= 3.1.6; without it use --no-chat") from error

    def refuse(message: str) -> NoReturn:
        raise jinja2.exceptions.TemplateError(message)

    # As templates expect it: blocks leave no lines behind, and JSON is not escaped for web pages.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    try:
        known = environment.from_string(template)
        text = known.render(messages=messages, add_generation_prompt=True, **special_tokens(directory))
    except (jinja2.exceptions.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{directory}: its chat template fails: {error}; use --no-chat") from error
    if not text:
        raise fail("prompt", "a text that the chat template keeps", "nothing (use --no-chat)")
    return text


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def stop_tokens(directory: Path, of_config: tuple[int, ...]) -> tuple[int, ...]:
    """The ids that end an answer: those of config.json and, where there is one, of generation_config.json.

    Raises:
      ValueError: generation_config.json is malformed.
    """
    path = directory / GENERATION
    more = read_json(path).get("eos_token_id") if path.is_file() else None
    ids = more if isinstance(more, list) else [] if more is None else [more]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise ValueError(f"{path}: expected eos_token_id to be token ids, got {more!r}")
    return tuple(dict.fromkeys((*of_config, *ids)))
