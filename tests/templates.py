"""Chat templates of the usual kinds, written for these tests."""

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message.role == 'assistant' and '</think>' in message.content %}
    {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
{%- else %}
    {%- set content = message.content %}
{%- endif %}
{{- content ~ '<|im_end|>' ~ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}
"""

MISTRAL = """{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if loop.first and message.role == 'system' %}
        {%- set ns.system = message.content + '\\n\\n' %}
        {%- continue %}
    {%- elif message.role == 'user' %}
        {{- '[INST] ' + (ns.system if loop.last else '') + message.content + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- else %}
        {{- raise_exception('Only user, system and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""

MACROS = """{%- macro turn(role, content) -%}
{%- generation -%}
<|im_start|>{{ role | upper }}: {{ content | tojson }}<|im_end|>
{%- endgeneration -%}
{%- endmacro -%}
{{- messages | map(attribute='role') | join(', ') }} {{ messages | length }}
{%- for message in messages | selectattr('role', 'in', ['user', 'assistant']) | list %}
{{- turn(**message) }} {{ loop.length }} {{ loop.revindex }} {{ loop.last }}
{%- if loop.index > 5 %}{% break %}{% endif %}
{%- endfor %}
{{- strftime_now('%Y') | int > 2000 }} {{ messages[-1].content.replace('a', '<b>').strip() }}
{%- for key, value in dict(a=1, b=[2, none])|items %}{{ key }}={{ value | string }};{% endfor %}
{%- for i in range(3) %}{{ i }}{% else %}none{% endfor %}{{ tools is none }}{{ nothing }}
"""

TEMPLATES = dict(qwen=CHATML, llama3=LLAMA3, gemma=GEMMA, mistral=MISTRAL, llama2=MISTRAL)
