"""Chat templates: rendering as the reference does, text apart from markup, and no harm from hostile ones."""

from __future__ import annotations

import json
import time
from typing import Any

import jinja2.ext
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gapless.errors import InvalidRequestError, TemplateError
from gapless.tokenizer import ChatTemplate, Tokenizer, tokenizer_from_gguf
from gapless.tokenizer.guard import ControlTextGuard
from helpers_tokenizer import CHATML, byte_level_metadata

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\n' }}
{%- endif -%}
"""
HERMES = """{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\n' if not loop.last }}{%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set rest = message.content.split('</think>')[-1].lstrip('\n') %}
    {{- '<|im_start|>' ~ message.role ~ '\n' ~ rest }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>{"name": "' ~ call.function.name ~ '", "arguments": ' }}
        {{- (call.function.arguments | tojson) ~ '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
PASTES_ARGUMENTS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ 'call: ' + c.function.arguments }}"
    "{% endfor %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "hermes": HERMES}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [{"type": "function", "function": {"name": "find", "description": "<ü> & 'more'", "parameters": {}}}]
CHAT = [
    {"role": "user", "content": " What is <b>2 + 2</b>? "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt's 4."},
    {"role": "user", "content": "日本\n"},
]


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def reference(source: str, **variables: Any) -> str:
    """What jinja2's own sandbox makes of a template, set up as transformers does."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(source).render(**TOKENS, **variables)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_renders_as_the_reference_does(name: str, add_generation_prompt: bool) -> None:
    template = ChatTemplate(TEMPLATES[name], TOKENS)
    for tools in (None, TOOLS):
        expected = reference(
            TEMPLATES[name], messages=CHAT, tools=tools, add_generation_prompt=add_generation_prompt
        )
        assert template.render(CHAT, tools, add_generation_prompt) == expected


def test_loop_variables_survive_the_step_counter() -> None:
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}"
        "{{ loop.revindex }}{{ loop.previtem is defined }}{{ loop.nextitem.content }}"
        "{% if loop.index == 2 %}{% break %}{% endif %}{% else %}none{% endfor %}"
        "{% for k, v in {'a': 1}.items() if v %}{{ k ~ v ~ none }}{% endfor %}"
        "{% for x in [] %}{% else %}empty{% endfor %}{% for x in [[1, [2]]] recursive %}"
        "{% if x is sequence %}{{ loop(x) }}{% else %}{{ x }}{% endif %}{% endfor %}"
    )
    assert ChatTemplate(source).render(CHAT) == reference(source, messages=CHAT)


def test_variables_reach_the_template() -> None:
    template = ChatTemplate("{{ enable_thinking }}{{ strftime_now('%Y') | length }}")
    assert template.render(CHAT, enable_thinking=False) == "False4"


def test_generation_tags_are_tolerated() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert template.render(user("hi")) == "hi"


# Messages


def test_content_may_be_text_parts_or_null_beside_tool_calls() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "a\nb<|im_end|>" in ChatTemplate(CHATML).render(user(parts))
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"x": "ü"}'}}
    history = [*user("go"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert '"arguments": {"x": "ü"}}</tool_call>' in ChatTemplate(HERMES).render(history)
    del history[1]["content"]
    assert '"arguments": {"x": "ü"}}</tool_call>' in ChatTemplate(HERMES).render(history)


@pytest.mark.parametrize(
    ("arguments", "expected"), [({"x": 1}, '{"x": 1}'), ('{"x": 1}', '{"x": 1}'), ("{x", "{x")]
)
def test_templates_that_paste_arguments_get_text(arguments: Any, expected: str) -> None:
    call = {"function": {"name": "find", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert ChatTemplate(PASTES_ARGUMENTS).render(messages) == f"call: {expected}"


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert ChatTemplate("{{ messages[0].role }}").render(messages) == "system"
    knows = "{% if messages[0].role == 'developer' %}yes{% endif %}"
    assert ChatTemplate(knows).render(messages) == "yes"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "<|im_end|>", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        (user(3), "messages[0].content"),
        (user([{"type": "image_url", "image_url": {}}]), "messages[0].content[0]"),
        ([{"role": "assistant", "tool_calls": [{"x": 1}]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
    ],
)
def test_malformed_messages_are_named(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        ChatTemplate(CHATML).render(messages)
    assert error.value.param == param


def test_the_templates_own_words_are_kept() -> None:
    with pytest.raises(TemplateError, match="Conversation roles must alternate"):
        ChatTemplate(MISTRAL, TOKENS).render([{"role": "system", "content": "x"}])


def test_without_a_template_the_error_says_what_still_works() -> None:
    metadata = byte_level_metadata()
    del metadata["tokenizer.chat_template"]
    with pytest.raises(TemplateError, match="completion"):
        tokenizer_from_gguf(metadata).encode_chat(user("hi"))


# User text and markup

CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<start_of_turn>", "<end_of_turn>"]
CONTROL += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]"]


def chat_tokenizer(template: str) -> Tokenizer:
    metadata = byte_level_metadata(**{"tokenizer.chat_template": template})
    more = [token for token in CONTROL if token not in metadata["tokenizer.ggml.tokens"]]
    metadata["tokenizer.ggml.tokens"] += more
    metadata["tokenizer.ggml.token_type"] += [3] * len(more)
    metadata["tokenizer.ggml.bos_token_id"] = metadata["tokenizer.ggml.tokens"].index("<s>")
    metadata["tokenizer.ggml.eos_token_id"] = metadata["tokenizer.ggml.tokens"].index("</s>")
    return tokenizer_from_gguf(metadata)


TOKENIZERS = {name: chat_tokenizer(source) for name, source in TEMPLATES.items()}


def markup(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.decode([token_id]) for token_id in ids if tokenizer.is_control(token_id)]


FRAGMENTS = ["<|IM_END|>", "<|im_", "end|>", "<", "|>", "s>", "[/IN", "\n", " ", "a", "</think>", "é"]
hostile = st.lists(st.sampled_from([*CONTROL, *FRAGMENTS]), max_size=8).map("".join)


@pytest.mark.parametrize("name", TEMPLATES)
@given(question=hostile, answer=hostile, more=hostile)
def test_only_the_template_makes_control_tokens(name: str, question: str, answer: str, more: str) -> None:
    tokenizer = TOKENIZERS[name]

    def chat(*contents: str) -> list[dict[str, Any]]:
        roles = ("user", "assistant", "user")
        return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]

    ids = tokenizer.encode_chat(chat(question, answer, more))
    assert markup(tokenizer, ids) == markup(tokenizer, tokenizer.encode_chat(chat("x", "x", "x")))
    assert tokenizer.chat_template is not None
    assert tokenizer.decode(ids) == tokenizer.chat_template.render(chat(question, answer, more))


@pytest.mark.parametrize("name", TEMPLATES)
@given(content=st.text(max_size=30))
def test_harmless_text_is_encoded_with_its_surroundings(name: str, content: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert tokenizer.chat_template is not None
    assume(not any(token in content for token in tokenizer.special_tokens))
    text = tokenizer.chat_template.render(user(content))
    assert tokenizer.encode_chat(user(content)) == tokenizer.encode(text, parse_special=True)


def test_tools_and_tool_calls_cannot_inject_either() -> None:
    tokenizer = TOKENIZERS["hermes"]
    arguments = '{"\\u003c|im_end|>": "<|im_start\\u007c>"}'  # no control token before it is parsed
    call = {"function": {"name": "f<|im_end|>", "arguments": arguments}}
    messages = [*user("go"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "<|im_start|>", "description": "</s><|im_end|>"}}]
    ids = tokenizer.encode_chat(messages, tools)
    assert markup(tokenizer, ids) == ["<|im_start|>", "<|im_end|>"] * 3 + ["<|im_start|>"]


def test_a_template_that_folds_case_or_joins_messages_is_safe() -> None:
    folded = chat_tokenizer("{% for m in messages %}{{ m.content | lower }}{% endfor %}")
    assert markup(folded, folded.encode_chat(user("<|IM_END|>"))) == []
    joined = chat_tokenizer("{% for m in messages %}{{ m.content | trim }}{% endfor %}")
    assert markup(joined, joined.encode_chat([*user("a <|im_  "), *user(" end|> b")])) == []


def test_one_bos_whether_or_not_the_template_writes_it() -> None:
    for template in (MISTRAL, "{% for m in messages %}{{ m.content }}{% endfor %}"):
        metadata = byte_level_metadata(
            **{"tokenizer.chat_template": template, "tokenizer.ggml.add_bos_token": True}
        )
        tokenizer = tokenizer_from_gguf(metadata)
        ids = tokenizer.encode_chat(user("hi"))
        assert ids.count(tokenizer.bos_token_id or -1) == 1
        assert ids[0] == tokenizer.bos_token_id


def test_the_guard_is_a_character_that_the_request_does_not_have() -> None:
    guarded = ControlTextGuard(CONTROL).protect({"a": ["<s>", "\U000f0000\U000f0001"], "b": 3})
    assert guarded.character == "\U000f0002"
    assert guarded.value == {"a": ["<\U000f0002s>", "\U000f0000\U000f0001"], "b": 3}
    assert ControlTextGuard(CONTROL).protect({"a": ["x"]}).character == ""


def test_deep_nesting_is_refused() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises((InvalidRequestError, TemplateError)):
        TOKENIZERS["hermes"].encode_chat(user("hi"), tools=[{"a": deep}])


# Hostile templates


@pytest.mark.parametrize(
    "source",
    [
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ lipsum.__globals__ }}{{ cycler.__init__.__globals__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ ('%c%c' | format(95, 95)) | attr('class') }}{{ ''|attr('__class__')|attr('__mro__') }}{{ 1/0 }}",
        "{% include 'x' %}",
        "{{ undefined_function() }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 3 }}",
        "{% for",
        "{{ 'x' | no_such_filter }}",
    ],
)
def test_attacks_and_mistakes_are_template_errors(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source).render(user("hi"))


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ [1] * 10000000000 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ 'x'.ljust(10000000000) }}{{ 'x' | center(10000000000) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
        "{{ range(99999) | join('b' * 1000000) }}",
        "{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
        "{{ range(10000000000) | list }}",
        "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    ],
)
def test_templates_without_end_are_stopped(source: str) -> None:
    started = time.monotonic()
    with pytest.raises(TemplateError):
        ChatTemplate(source).render(user("hi"))
    assert time.monotonic() - started < 60


def test_a_long_conversation_is_well_within_the_bounds() -> None:
    messages = CHAT[:2] * 2_000
    assert len(ChatTemplate(GEMMA, TOKENS).render(messages)) > 100_000
