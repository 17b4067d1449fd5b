"""Small chat templates in the ways in which public models' are written."""

# ruff: noqa: E501 (templates are kept in the lines of those that they are like)

from typing import NamedTuple


class Style(NamedTuple):
    """A template, and what it reads: contents as `str`, `parts` or both; system; tools' calls."""

    template: str
    takes: str = "str"
    has_system: bool = True
    has_tools: bool = False


def _lines(text: str) -> str:
    return "".join(line.strip() for line in text.strip().splitlines())


_PARTS = "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}"

STYLES: dict[str, Style] = {
    # The system prompt goes into the first question, and turns must alternate.
    "llama-2": Style(
        _lines("""
        {% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
        {% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}
        {% set system_message = false %}{% endif %}
        {% for message in loop_messages %}
        {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
        {% if loop.index0 == 0 and system_message != false %}
        {% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
        {% else %}{% set content = message['content'] %}{% endif %}
        {% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
        {% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}
        {% endif %}{% endfor %}""")
    ),
    "llama-3": Style(
        _lines("""
        {% for message in messages %}
        {% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' %}
        {% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}
        {% endfor %}
        {% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""")
    ),
    # A call of a tool is written, and what is said beside it is not; other contents as JSON.
    "llama-3.1": Style(
        _lines("""
        {{ bos_token }}
        {% if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content'] | trim %}
        {% set messages = messages[1:] %}{% else %}{% set system_message = '' %}{% endif %}
        {{ '<|start_header_id|>system<|end_header_id|>\\n\\n' + system_message + '<|eot_id|>' }}
        {% if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}
        {% for message in messages %}
        {% if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
        {% elif 'tool_calls' in message %}
        {% if message.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
        {% set tool_call = message.tool_calls[0].function %}
        {{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{ '{"name": "' + tool_call.name + '", "parameters": ' }}{{ tool_call.arguments | tojson }}{{ '}<|eot_id|>' }}
        {% elif message.role == 'tool' or message.role == 'ipython' %}
        {{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {% if message.content is mapping or message.content is iterable %}{{ message.content | tojson }}
        {% else %}{{ message.content }}{% endif %}{{ '<|eot_id|>' }}{% endif %}{% endfor %}
        {% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""),
        has_tools=True,
    ),
    "llama-3.2-vision": Style(
        _lines("""
        {{ bos_token }}{% for message in messages %}
        {{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {% if message['content'] is string %}{{ message['content'] }}
        {% else %}{% for content in message['content'] %}
        {% if content['type'] == 'image' %}{{ '<|image|>' }}
        {% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}
        {{ '<|eot_id|>' }}{% endfor %}
        {% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""),
        takes="both",
    ),
    # The system prompt is put before the last question.
    "mistral": Style(
        _lines("""
        {% if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content'] %}
        {% set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}
        {{ bos_token }}{% for message in loop_messages %}
        {% if message['role'] == 'user' %}
        {% if loop.last and system_message is defined %}{{ '[INST] ' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}
        {% else %}{{ '[INST] ' + message['content'] + '[/INST]' }}{% endif %}
        {% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}
        {% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
        {% endfor %}""")
    ),
    "chatml": Style(
        _lines("""
        {% for message in messages %}
        {{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}
        {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""")
    ),
    # Earlier thoughts are left out, tools are given, and content that is no string is nothing.
    "qwen-3": Style(
        _lines("""
        {% if tools %}{{ '<|im_start|>system\\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
        {% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
        {% elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
        {% set ns = namespace(last=messages | length - 1) %}
        {% for message in messages[::-1] %}{% set index = (messages | length - 1) - loop.index0 %}
        {% if message.role == 'user' and message.content is string and not message.content.startswith('<tool_response>') %}
        {% set ns.last = index %}{% break %}{% endif %}{% endfor %}
        {% for message in messages %}
        {% if message.content is string %}{% set content = message.content %}{% else %}{% set content = '' %}{% endif %}
        {% if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
        {% elif message.role == 'assistant' %}{% set reasoning_content = '' %}
        {% if message.reasoning_content is string %}{% set reasoning_content = message.reasoning_content %}
        {% elif '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
        {% if loop.index0 > ns.last and reasoning_content %}{{ '<|im_start|>assistant\\n<think>\\n' + reasoning_content + '\\n</think>\\n\\n' + content }}
        {% else %}{{ '<|im_start|>assistant\\n' + content }}{% endif %}
        {% if message.tool_calls %}{% for tool_call in message.tool_calls %}
        {% if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
        {{ '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
        {% if tool_call.arguments is string %}{{ tool_call.arguments }}{% else %}{{ tool_call.arguments | tojson }}{% endif %}{{ '}\\n</tool_call>' }}{% endfor %}{% endif %}
        {{ '<|im_end|>\\n' }}
        {% elif message.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}{% endif %}
        {% endfor %}
        {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
        {% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""),
        has_tools=True,
    ),
    "gemma": Style(
        _lines("""
        {{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
        {% for message in messages %}
        {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}
        {% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
        {{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
        {% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""),
        has_system=False,
    ),
    "gemma-3": Style(
        _lines("""
        {{ bos_token }}{% if messages[0]['role'] == 'system' %}
        {% if messages[0]['content'] is string %}{% set first_user_prefix = messages[0]['content'] + '\\n\\n' %}
        {% else %}{% set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' %}{% endif %}
        {% set loop_messages = messages[1:] %}{% else %}{% set first_user_prefix = '' %}{% set loop_messages = messages %}{% endif %}
        {% for message in loop_messages %}
        {% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
        {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else '') }}
        {% if message['content'] is string %}{{ message['content'] | trim }}
        {% elif message['content'] is iterable %}{% for item in message['content'] %}
        {% if item['type'] == 'image' %}{{ '<start_of_image>' }}{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}
        {% else %}{{ raise_exception('Invalid content type') }}{% endif %}{{ '<end_of_turn>\\n' }}{% endfor %}
        {% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""),
        takes="both",
    ),
    "phi-3": Style(
        _lines("""
        {% for message in messages %}
        {% if message['role'] == 'system' %}{{ '<|system|>\\n' + message['content'] + '<|end|>\\n' }}
        {% elif message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '<|end|>\\n' }}
        {% elif message['role'] == 'assistant' %}{{ '<|assistant|>\\n' + message['content'] + '<|end|>\\n' }}{% endif %}
        {% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}""")
    ),
    "phi-4": Style(
        _lines("""
        {% for message in messages %}
        {% if message['role'] == 'system' %}{{ '<|im_start|>system<|im_sep|>' + message['content'] + '<|im_end|>' }}
        {% elif message['role'] == 'user' %}{{ '<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>' }}
        {% elif message['role'] == 'assistant' %}{{ '<|im_start|>assistant<|im_sep|>' + message['content'] + '<|im_end|>' }}{% endif %}
        {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}""")
    ),
    "qwen-2.5-vl": Style(
        _lines("""
        {% set image_count = namespace(value=0) %}{% for message in messages %}
        {% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}
        {{ '<|im_start|>' + message['role'] + '\\n' }}
        {% if message['content'] is string %}{{ message['content'] + '<|im_end|>\\n' }}
        {% else %}{% for content in message['content'] %}
        {% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
        {% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}
        {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""),
        takes="both",
    ),
    "llava": Style(
        "{% for m in messages %}{{ m['role'].upper() }}: " + _PARTS + " {% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
        takes="parts",
    ),
    "idefics": Style(
        _lines("""
        {{ bos_token }}{% for message in messages %}{{ message['role'] | capitalize }}
        {% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}
        {% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}
        {% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}
        {{ '<end_of_utterance>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""),
        takes="parts",
    ),
    # A system prompt is a str and what users say are parts.
    "system-and-parts": Style(
        "{% for m in messages %}{% if m['role'] == 'system' %}<s>{{ m['content'] + '\\n' }}{% else %}"
        "{{ m['role'] }}: " + _PARTS + "\\n{% endif %}{% endfor %}assistant:",
        takes="mixed",
    ),
    "command-r": Style(
        _lines("""
        {{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}
        {% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}
        {% if system_message != false %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system_message + '<|END_OF_TURN_TOKEN|>' }}{% endif %}
        {% if documents %}{% for document in documents %}{{ 'Document: ' + loop.index0 | string + '\\n' }}
        {% for key, value in document.items() %}{{ key + ': ' + value + '\\n' }}{% endfor %}{% endfor %}{% endif %}
        {% for message in loop_messages %}{% set content = message['content'] %}
        {% if message['role'] == 'user' %}{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}
        {% elif message['role'] == 'assistant' %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}
        {% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}""")
    ),
    "deepseek": Style(
        _lines("""
        {% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
        {% set ns = namespace(is_first=false, system_prompt='', is_first_sp=true) %}
        {% for message in messages %}{% if message['role'] == 'system' %}
        {% if ns.is_first_sp %}{% set ns.system_prompt = ns.system_prompt + message['content'] %}{% set ns.is_first_sp = false %}
        {% else %}{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}{% endif %}{% endif %}{% endfor %}
        {{ bos_token }}{{ ns.system_prompt }}
        {% for message in messages %}
        {% if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}{% endif %}
        {% if message['role'] == 'assistant' and message['content'] is not none %}{% set content = message['content'] %}
        {% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{ '<|Assistant|>' + content + '<|end|>' }}{% endif %}{% endfor %}
        {% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}""")
    ),
    "zephyr": Style(
        "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
        "{{ '<|user|>\\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'system' %}\n{{ '<|system|>\\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\\n' + message['content'] + eos_token }}\n"
        "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
    ),
    "granite": Style(
        _lines("""
        {% if tools %}{{ '<|start_of_role|>tools<|end_of_role|>' + tools | tojson(indent=4) + '<|end_of_text|>\\n' }}{% endif %}
        {% for message in messages %}
        {% if message.role == 'user' %}{{ '<|start_of_role|>user<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
        {% elif message.role == 'assistant_tool_call' %}{{ '<|start_of_role|>assistant<|end_of_role|><|tool_call|>' + message['content'] + '<|end_of_text|>\\n' }}
        {% else %}{{ '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}{% endif %}
        {% endfor %}{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}""")
    ),
    "gpt-oss": Style(
        _lines("""
        {% macro said(role, text) %}{{ '<|start|>' + role + '<|message|>' + text + '<|end|>' }}{% endmacro %}
        {% if messages[0].role == 'developer' or messages[0].role == 'system' %}{% set developer_message = messages[0].content %}
        {% set loop_messages = messages[1:] %}{% else %}{% set developer_message = '' %}{% set loop_messages = messages %}{% endif %}
        {{ said('system', 'Reasoning: ' + (reasoning_effort or 'medium')) }}
        {% if developer_message %}{{ said('developer', '# Instructions\\n\\n' + developer_message) }}{% endif %}
        {% for message in loop_messages %}
        {% if message.role == 'assistant' %}
        {% if 'tool_calls' in message %}{% set call = message.tool_calls[0].function %}
        {{ '<|start|>assistant to=functions.' + call.name + '<|message|>' + call.arguments | tojson + '<|call|>' }}
        {% elif loop.last and not add_generation_prompt %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{% endif %}
        {% elif message.role == 'tool' %}{{ '<|start|>functions to=assistant<|message|>' + message.content | tojson + '<|end|>' }}
        {% elif message.role == 'user' %}{{ said('user', message.content) }}{% endif %}{% endfor %}
        {% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""),
        has_tools=True,
    ),
    "alpaca": Style(
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n\n{% elif m.role == 'user' %}### Instruction:\n{{ m.content }}\n\n"
        "{% elif m.role == 'assistant' %}### Response:\n{{ m.content }}\n\n{% endif %}{% endfor %}### Response:\n"
    ),
    "vicuna": Style(
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %} USER: {{ m.content }}"
        "{% else %} ASSISTANT: {{ m.content }}{{ eos_token }}{% endif %}{% endfor %} ASSISTANT:"
    ),
    "smolvlm": Style(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for c in m.content %}"
        "{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}",
        takes="parts",
    ),
    "pixtral": Style(
        _lines("""
        {{ bos_token }}{% for message in messages %}{% if message['role'] in ('user', 'system') %}{{ '[INST]' }}
        {% if message['content'] is not string %}{% for chunk in message['content'] %}
        {% if chunk['type'] == 'text' %}{{ chunk['text'] }}{% elif chunk['type'] == 'image' %}{{ '[IMG]' }}
        {% else %}{{ raise_exception('Unrecognized content type!') }}{% endif %}{% endfor %}
        {% else %}{{ message['content'] }}{% endif %}{{ '[/INST]' }}
        {% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}
        {% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""),
        takes="parts of users",
    ),
}
