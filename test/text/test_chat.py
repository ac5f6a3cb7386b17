"""Chat templates: the same prompts as transformers, exact continuations, and errors that are the client's."""

from __future__ import annotations

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from radixpd.errors import BadRequest, ConfigError
from radixpd.text.chat import ChatTemplate, load_chat_template

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
INST = """{{ bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate <user> & "assistant"') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content | trim + ' [/INST]' }}
    {%- else %}
        {% generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}"""
TOOLS = """{%- set ns = namespace(count=0) %}
{% if tools %}
Tools: {{ tools | tojson(indent=2) }}
{% endif %}
{% for message in messages %}
    {% if message.content is string %}
        {% set content = message.content %}
{{ message.role }}: {{ content }}
    {% else %}
{{ message.role }}:
        {%- for part in message.content %} {{ part.text }}{% endfor %}

    {% endif %}
    {% set ns.count = ns.count + 1 %}
    {% if ns.count > 3 %}{% break %}{% endif %}
{% endfor %}
{{ mode | default('none') }}{% if add_generation_prompt %}

assistant:{% endif %}"""
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [
    {"role": "user", "content": " What is <b>1 & 1</b>?\n"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "größe '日本' \"q\""},
]
ASK_TOOLS = [{"type": "function", "function": {"name": "f", "description": "a <tag> & 'é'", "parameters": {"type": "object"}}}]
TEMPLATES = {"chatml": CHATML, "inst": INST, "tools": TOOLS}


def by_transformers(source, messages, **options):
    rendered, _ = render_jinja_template(conversations=[messages], chat_template=source, **SPECIALS, **options)
    return rendered[0]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("tools", [None, ASK_TOOLS])
def test_renders_as_transformers_does(name, generation, turns, tools):
    template = ChatTemplate({"default": TEMPLATES[name]}, SPECIALS)
    ours = template.render(TALK[:turns], add_generation_prompt=generation, tools=tools, template_kwargs={"mode": "fast"})
    assert ours == by_transformers(TEMPLATES[name], TALK[:turns], add_generation_prompt=generation, tools=tools, mode="fast")


@pytest.mark.parametrize("name", TEMPLATES)
def test_continues_as_transformers_does(name):
    template = ChatTemplate({"default": TEMPLATES[name]}, SPECIALS)
    assert template.render(TALK[:2], continue_final_message=True) == by_transformers(TEMPLATES[name], TALK[:2], continue_final_message=True)


TRIMS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.mark.parametrize("source", [CHATML, INST, TOOLS, TRIMS])
@pytest.mark.parametrize("text", ["OK! ", "OK!\n", "", "\n OK", "OK", "@CONTINUE@", " "])
def test_a_continued_message_ends_the_prompt_exactly(source, text):
    template = ChatTemplate({"default": source}, SPECIALS)
    prompt = template.render([TALK[0], {"role": "assistant", "content": text}], continue_final_message=True)
    whole = template.render([TALK[0], {"role": "assistant", "content": "@"}], add_generation_prompt=False)
    assert prompt == whole[: whole.rindex("@")] + text


def test_a_continued_message_in_parts():
    template = ChatTemplate({"default": TOOLS}, SPECIALS)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}]
    assert template.render([{"role": "assistant", "content": parts}], continue_final_message=True).endswith("assistant: one two ")


def test_a_refusal_by_the_template_is_the_clients_error():
    template = ChatTemplate({"default": INST}, SPECIALS)
    with pytest.raises(BadRequest, match='Roles must alternate <user> & "assistant"'):
        template.render([{"role": "system", "content": "x"}])


@pytest.mark.parametrize(
    "source", ["{{ messages[0].content + 1 }}", "{{ messages[9].role.x }}", "{{ 1 // 0 }}", "{{ messages.append(1) }}"]
)
def test_whatever_goes_wrong_inside_is_a_bad_request(source):
    with pytest.raises(BadRequest, match="chat template"):
        ChatTemplate({"default": source}, {}).render(TALK)


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.__class__ }}"])
def test_the_sandbox_shows_no_internals(source):
    try:
        shown = ChatTemplate({"default": source}, {}).render(TALK)
    except BadRequest:
        return
    assert "class" not in shown


def test_parts_are_joined_only_where_the_template_wants_a_string():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}]
    assert "user\none two<|im_end|>" in ChatTemplate({"default": CHATML}, {}).render(messages)
    assert ChatTemplate({"default": TOOLS}, {}).render(messages) == by_transformers(TOOLS, messages, add_generation_prompt=True)


@pytest.mark.parametrize("content", [[{"type": "image_url", "image_url": {"url": "x"}}], ["x"], 5, [{"type": "text"}]])
def test_content_that_is_no_text_is_refused(content):
    with pytest.raises(BadRequest) as caught:
        ChatTemplate({"default": CHATML}, {}).render([{"role": "user", "content": content}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("part", [{"type": "text", "text": 5}, {"type": "text"}, {"type": "text", "text": None}])
def test_a_text_part_without_text_is_told_what_it_lacks(part):
    with pytest.raises(BadRequest, match="the text of a content part must be a string"):
        ChatTemplate({"default": CHATML}, {}).render([{"role": "user", "content": [part]}])


def test_missing_content_counts_as_empty():
    assert ChatTemplate({"default": CHATML}, {}).render([{"role": "assistant", "content": None}]).count("assistant\n<|im_end|>") == 1


def test_reserved_names_and_empty_conversations_are_refused():
    template = ChatTemplate({"default": CHATML}, {})
    with pytest.raises(BadRequest, match="may not set messages"):
        template.render(TALK, template_kwargs={"messages": []})
    with pytest.raises(BadRequest, match="empty"):
        template.render([])


def test_date_helper():
    assert ChatTemplate({"default": "{{ strftime_now('%Y') }}"}, {}).render(TALK).isdigit()


def test_where_templates_come_from(tmp_path):
    assert load_chat_template(tmp_path) is None
    named = [{"name": "default", "template": "plain{{ bos_token }}"}, {"name": "tool_use", "template": "tools"}]
    config = {"bos_token": {"content": "<s>"}, "chat_template": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = load_chat_template(tmp_path)
    assert template is not None
    assert (template.render(TALK), template.render(TALK, tools=ASK_TOOLS)) == ("plain<s>", "tools")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_chat_template(tmp_path).render(TALK) == "file"
    other = tmp_path / "other.jinja"
    other.write_text("override{{ bos_token }}")
    assert load_chat_template(tmp_path, override=str(other)).render(TALK, tools=ASK_TOOLS) == "override<s>"


def test_a_bad_template_stops_the_start(tmp_path):
    with pytest.raises(ConfigError, match="--chat-template"):
        load_chat_template(tmp_path, override=str(tmp_path / "absent.jinja"))
    with pytest.raises(ConfigError, match="Jinja"):
        ChatTemplate({"default": "{% for %}"}, {})


def test_a_bad_template_is_named_by_its_file(tmp_path):
    def fault(**given):
        with pytest.raises(ConfigError) as caught:
            load_chat_template(tmp_path, **given)
        return str(caught.value)

    (tmp_path / "t.jinja").write_text("{% for %}")
    assert f"the chat template {tmp_path / 't.jinja'} is no valid Jinja" in fault(override=str(tmp_path / "t.jinja"))
    absent = str(tmp_path / "absent.jinja")
    assert fault(override=absent) == f"--chat-template {absent}: the file cannot be read (No such file or directory)"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "default", "template": "{% for %}"}]}))
    assert "the chat template default in tokenizer_config.json is" in fault()
    (tmp_path / "chat_template.jinja").write_text("{{ ")
    assert "the chat template chat_template.jinja is" in fault()
