"""The parsers of tool calls by name, as ``--tool-call-parser`` has them."""

from __future__ import annotations

from collections.abc import Callable

from jserve.text.chat.parsers.calls import CallParser, HermesCalls, LlamaCalls, MistralCalls
from jserve.text.chat.parsers.delta import ParsedDelta
from jserve.text.chat.parsers.harmony import HarmonyParser
from jserve.text.chat.parsers.marked import CohereCalls, DeepSeekCalls, Glm4Calls, PhiCalls
from jserve.text.chat.parsers.python_calls import gemma3, llama4, pythonic


class NoCalls:
    """A model that writes none, or a request without tools: all is content."""

    def feed(self, text: str) -> ParsedDelta:
        parsed = ParsedDelta()
        parsed.add_text(text)
        return parsed

    def close(self) -> ParsedDelta:
        return ParsedDelta()


CALL_PARSERS: dict[str, Callable[[], CallParser]] = {
    "none": NoCalls,
    "hermes": HermesCalls,
    "llama3": LlamaCalls,
    "mistral": MistralCalls,
    "deepseek_v3": DeepSeekCalls,
    "deepseek_v31": DeepSeekCalls,
    "phi4_mini_json": PhiCalls,
    "glm4": Glm4Calls,
    "cohere_command": CohereCalls,
    "pythonic": pythonic,
    "llama4_pythonic": llama4,
    "gemma3": gemma3,
    "openai": HarmonyParser,
}
