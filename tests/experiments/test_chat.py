"""Chat templates: what they write, where they come from, and what they may not do."""

import json
from pathlib import Path

import pytest

from experiments import chat

pytest.importorskip("jinja2")
TEMPLATE = """{{ bos_token }}{% for message in messages %}
    {% if message.role == 'system' %}{{ raise_exception('no system') }}{% endif %}
<{{ message['role'] }}>{{ message['content'] | trim }}</>{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}"""


def directory(folder: Path, **config: object) -> Path:
    (folder / chat.CONFIG).write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"} | config))
    return folder


def test_a_template_of_the_tokenizer_s_configuration(tmp_path: Path) -> None:
    folder = directory(tmp_path, chat_template=TEMPLATE)
    template = chat.read_template(folder)
    assert template is not None
    assert chat.render(template, folder, " what? ") == "<s><user>what?</><assistant>"


def test_a_template_in_a_file_of_its_own_comes_first(tmp_path: Path) -> None:
    folder = directory(tmp_path, chat_template="other")
    (folder / chat.TEMPLATE).write_text("{{ messages | length }}{{ messages | tojson }}")
    text = chat.render(chat.read_template(folder) or "", folder, "<a>", "b")
    assert text == '2[{"role": "system", "content": "b"}, {"role": "user", "content": "<a>"}]'


def test_several_templates(tmp_path: Path) -> None:
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    assert chat.read_template(directory(tmp_path, chat_template=named)) == "d"
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: expected one chat_template"):
        chat.read_template(directory(tmp_path, chat_template=named[:1]))


def test_no_template(tmp_path: Path) -> None:
    assert chat.read_template(tmp_path) is None
    assert chat.read_template(directory(tmp_path)) is None


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{% if %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{% include '/etc/passwd' %}",
        "{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
        "{% for i in range(999999999) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_or_asks_for_more_is_an_error(template: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"its chat template fails: .*; use --no-chat"):
        chat.render(template, directory(tmp_path), "x")


def test_a_template_that_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`prompt`: expected a text that the chat template keeps"):
        chat.render("{# nothing #}", tmp_path, "x")


def test_ids_that_end_an_answer(tmp_path: Path) -> None:
    assert chat.stop_tokens(tmp_path, (1,)) == (1,)
    for more, ids in ((7, (1, 7)), ([1, 9], (1, 9)), (None, (1,))):
        (tmp_path / chat.GENERATION).write_text(json.dumps({"eos_token_id": more}))
        assert chat.stop_tokens(tmp_path, (1,)) == ids
    (tmp_path / chat.GENERATION).write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ValueError, match=r"generation_config\.json: expected eos_token_id"):
        chat.stop_tokens(tmp_path, (1,))
