"""A chat template comes from a download: it ends, it stays in its sandbox, and what it does wrong is one sentence."""

from __future__ import annotations

import pytest

from dayzero.chat.template import render
from dayzero.errors import UsageError

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]

WORKS = [
    ("{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ m.role ~ ':' ~ m['content'] }} {% endfor %}",
     "1/2user:hi 2/2assistant:ho "),
    ("{% for m in messages %}{{ m.content }}{% if loop.first %}{% break %}{% endif %}{% endfor %}", "hi"),
    ("{% for m in messages if m.role == 'tool' %}x{% else %}none{% endfor %}", "none"),
    ("{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{% endfor %}", "a1b2"),
    ("{% for i in range(3) %}{{ i }}{% if loop.last %}.{% endif %}{% endfor %}", "012."),
    ("{% for c in 'ab' + 'c' %}{{ c * 2 }}{% endfor %}{{ 2 ** 10 }}", "aabbcc1024"),
    ("{{ messages[0] | tojson }}{{ (messages | map(attribute='role') | list)[-1] }}",
     '{"role": "user", "content": "hi"}assistant'),
    ("{% macro f(n) %}{% if n %}{{ n }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}", "321"),
    ("{% if add_generation_prompt %}{{ bos_token }}{% endif %}", "<s>"),
]  # fmt: skip

REFUSED = [
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "does not end"),
    ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "does not end"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ("{{ 'a' * 10 ** 10 }}", "characters"),
    ("{{ [1] * 10 ** 10 }}", "characters"),
    ("{{ 10 ** 1000000 }}", "power"),
    ("{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "characters"),
    ("{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}", "characters"),
    ("{{ range(10 ** 9) }}", "Range too big"),
    ("{{ lipsum(n=1000000) }}", "undefined"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{{ cycler.__init__.__globals__ }}", "unsafe"),
    ("{{ messages.append(1) }}", "unsafe"),
    ("{% include '/etc/hostname' %}", "no loader"),
    ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ("{{ strftime_now(5) }}", "TypeError"),
    ("{% if %}", "TemplateSyntaxError"),
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
]


@pytest.mark.parametrize(("template", "text"), WORKS)
def test_what_templates_do_still_works(template: str, text: str) -> None:
    assert render(template, MESSAGES, {"bos_token": "<s>"}) == text


@pytest.mark.parametrize(("template", "said"), REFUSED)
def test_what_no_prompt_needs_is_refused(template: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        render(template, MESSAGES)
    assert len(str(caught.value)) < 400
