"""Chat templates by name, for recipes that give a merged model another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

_ROLES = "conversation roles must alternate: user, assistant, user, ..."

CHAT_TEMPLATES = {
    "chatml": (
        "{% for m in messages %}"
        "{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama3": (
        "{% for m in messages %}"
        "{{ (bos_token if loop.first else '') ~ '<|start_header_id|>' ~ m.role"
        " ~ '<|end_header_id|>\\n\\n' ~ m.content | trim ~ '<|eot_id|>' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
        "{% endif %}"
    ),
    "mistral": (
        "{% set first = messages[0].content ~ '\\n\\n' if messages[0].role == 'system' else '' %}"
        "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}"
        "{{ bos_token }}"
        "{% for m in turns %}"
        "{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}"
        f"{{{{ raise_exception('{_ROLES}') }}}}"
        "{% elif m.role == 'user' %}"
        "{{ ' [INST] ' ~ (first if loop.first else '') ~ m.content ~ ' [/INST]' }}"
        "{% else %}{{ ' ' ~ m.content ~ eos_token }}{% endif %}"
        "{% endfor %}"
    ),
    "alpaca": (
        "{% set titles = {'user': 'Instruction', 'assistant': 'Response',"
        " 'user_context': 'Input'} %}"
        "{% set system = messages | selectattr('role', 'equalto', 'system') | list %}"
        "{{ (system | last).content | trim if system else '' }}{{ '\\n\\n' }}"
        "{% for m in messages if m.role in titles %}"
        "{{ '### ' ~ titles[m.role] ~ ':\\n' ~ m.content | trim }}"
        "{{ '' if m == messages[-1] else '\\n\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'assistant' %}"
        "{{ '### Response:\\n' }}"
        "{% endif %}"
    ),
    "exaone": (
        "{% for m in messages %}"
        "{{ '[|system|][|endofturn|]\\n' if loop.first and m.role != 'system' else '' }}"
        "{{ '[|' ~ m.role ~ '|]' ~ m.content }}"
        "{{ '\\n' if m.role == 'user' else '[|endofturn|]\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '[|assistant|]' }}{% endif %}"
    ),
}


def chat_template(given: str, others: Iterable[str]) -> str | None:
    """The template that a recipe asks for: by its name, in a file, or as it stands there.

    `auto` is the one that most of the `others` are, None if there is none.
    """
    if given == "auto":
        counts = Counter(text.strip() for text in others if text.strip())
        return counts.most_common(1)[0][0] if counts else None
    if given in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[given]
    return given if "{" in given else Path(given).expanduser().read_text("utf-8")
