"""Chats as data, and the two ways to print them: the Jinja template users get and a fast formatter.

Owns the special tokens, the chat template and `segments`, which renders the same text with a loss
weight on every piece. A test holds the two renderings equal, so what is trained is what is served.
The markup is ChatML with the think and tool_call tags that Qwen and Hermes made common; tools are
declared as one-line signatures because a small context should not be spent on JSON schema.
"""

import json
from dataclasses import dataclass

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
# Marked as ordinary added tokens: decoding with skip_special_tokens must keep them for parsers.
MARKUP_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
NO_THINKING = "<think>\n\n</think>\n\n"
PROMPT_WEIGHT = 0.03
SEAM = ("", 0.0)
"""A piece without text: what is before it and what is after it are tokenised apart."""

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- macro signature(tool) -%}
{%- set f = tool.function if tool.function is defined else tool -%}
{{ f.name }}({%- set given = f.parameters.properties if f.parameters is mapping -%}
{%- for name, spec in (given if given is mapping else {}).items() -%}
{{ name }}: {{ spec.type }}{{ ', ' if not loop.last }}
{%- endfor -%}): {{ f.description }}
{%- endmacro -%}
{%- set ns = namespace(last_user=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- set thinking = enable_thinking is not defined or enable_thinking -%}
{%- set has_system = messages and messages[0].role == 'system' -%}
{%- if has_system or tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if has_system -%}{{- text(messages[0].content) -}}{%- endif -%}
{%- if has_system and tools -%}{{- '\\n\\n' -}}{%- endif -%}
{%- if tools -%}
{{- '# Tools' -}}
{%- for tool in tools -%}{{- '\\n' + signature(tool) -}}{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.last_user -%}
{%- if m.reasoning_content and thinking -%}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' -}}
{%- elif not thinking -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}
{{- text(m.content) -}}
{%- for call in m.tool_calls or [] -%}
{%- set f = call.function if call.function is defined else call -%}
{%- if not loop.first or m.content -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + f.name + '", "arguments": ' -}}
{{- f.arguments if f.arguments is string else f.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' -}}
{{- text(m.content) + '\\n</tool_response><|im_end|>\\n' -}}
{%- elif not (m.role == 'system' and loop.first) -%}
{{- '<|im_start|>' + m.role + '\\n' + text(m.content) + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if not thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict


@dataclass(frozen=True)
class Turn:
    role: str
    text: str = ""
    thinking: str | None = None
    call: Call | None = None
    pieces: tuple[tuple[str, float], ...] = ()  # `text` again, with a loss weight on each piece


@dataclass(frozen=True)
class Tool:
    name: str
    description: str
    parameters: dict  # parameter name -> JSON type


@dataclass(frozen=True)
class Chat:
    """One training example; with no turns it is `plain` text for the language-model objective."""

    skill: str
    turns: tuple[Turn, ...] = ()
    tools: tuple[Tool, ...] = ()
    thinking: bool = True
    plain: str = ""


def user(text: str) -> Turn:
    return Turn("user", text)


def reply(text: str, thinking: str | None = None) -> Turn:
    return Turn("assistant", text, thinking)


def ask(skill: str, question: str, answer: str, thinking: str | None = None) -> Chat:
    return Chat(skill, (user(question), reply(answer, thinking)))


def body(turn: Turn) -> str:
    """What an assistant turn says after its thinking."""
    if turn.call is None:
        return turn.text
    arguments = json.dumps(turn.call.arguments, ensure_ascii=False)
    call = f'<tool_call>\n{{"name": "{turn.call.name}", "arguments": {arguments}}}\n</tool_call>'
    return f"{turn.text}\n{call}" if turn.text else call


def _signature(tool: Tool) -> str:
    inside = ", ".join(f"{name}: {kind}" for name, kind in tool.parameters.items())
    return f"\n{tool.name}({inside}): {tool.description}"


def _system(chat: Chat) -> str:
    parts = [chat.turns[0].text] if chat.turns[0].role == "system" else []
    if chat.tools:
        parts.append("# Tools" + "".join(map(_signature, chat.tools)))
    return "\n\n".join(parts)


def _assistant(turn: Turn, open_turn: bool, thinking: bool) -> list[tuple[str, float]]:
    """`open_turn`: after the last user turn, where thinking is still part of the text."""
    head, weight = "<|im_start|>assistant\n", 1.0
    answer = body(turn)
    if open_turn and not thinking:
        head += NO_THINKING
    if turn.pieces:
        return [(head, 0.0), *turn.pieces, (TURN_END, weight), ("\n", 0.0)]
    if turn.thinking and open_turn and thinking:
        answer = f"<think>\n{turn.thinking}\n</think>\n\n{answer}"
    elif turn.thinking and not open_turn:
        # The thinking was stripped from history; learning the bare answer would unlearn thinking.
        weight = 0.0
    return [(head, 0.0), (answer + TURN_END, weight), ("\n", 0.0)]


def segments(chat: Chat) -> list[tuple[str, float]]:
    """The chat as (text, loss weight) pieces; their concatenation is what the template renders."""
    if not chat.turns:
        return [(chat.plain + END_OF_TEXT, 0.5)]
    out: list[tuple[str, float]] = []
    if system := _system(chat):
        out.append((f"<|im_start|>system\n{system}<|im_end|>\n", PROMPT_WEIGHT))
    last_user = max(i for i, turn in enumerate(chat.turns) if turn.role == "user")
    for i, turn in enumerate(chat.turns):
        if turn.role == "assistant":
            out += _assistant(turn, i > last_user, chat.thinking)
        elif turn.role == "tool":
            text = f"<tool_response>\n{turn.text}\n</tool_response>"
            out.append((f"<|im_start|>user\n{text}<|im_end|>\n", PROMPT_WEIGHT))
        elif turn.role == "user":
            out.append((f"<|im_start|>user\n{turn.text}<|im_end|>\n", PROMPT_WEIGHT))
    return out


def prompt_and_answer(chat: Chat) -> tuple[str, str]:
    """Split before the last assistant turn: what a server is sent, and what it should say."""
    parts = [text for text, _ in segments(chat)]
    answers = len(chat.turns[-1].pieces) + 1
    answer = "".join(parts[-answers - 1 : -1])
    return "".join(parts[: -answers - 1]), answer.removesuffix(TURN_END)


def as_messages(chat: Chat) -> tuple[list[dict], list[dict]]:
    """The same chat as OpenAI-style messages and tools, for the Jinja template."""
    return [_message(turn) for turn in chat.turns], [_declaration(tool) for tool in chat.tools]


def _message(turn: Turn) -> dict:
    message: dict = {"role": turn.role, "content": turn.text}
    if turn.thinking:
        message["reasoning_content"] = turn.thinking
    if turn.call:
        function = {"name": turn.call.name, "arguments": turn.call.arguments}
        message["tool_calls"] = [{"type": "function", "function": function}]
    return message


def _declaration(tool: Tool) -> dict:
    properties = {name: {"type": kind} for name, kind in tool.parameters.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}
