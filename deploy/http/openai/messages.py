"""Messages of a conversation, as `POST /v1/chat/completions` has them."""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from deploy.http.body import CONTENT_UNLESS_ASSISTANT, Strict, check_content, refusal, type_of
from deploy.http.generation.arguments import Arguments
from deploy.http.generation.tool_use import called_with_text


class _PartOfMessage(Strict):
    """Unknown keys are ignored, as in vLLM: clients decorate what they send back."""

    model_config = ConfigDict(extra="ignore")


class TextPart(_PartOfMessage):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(_PartOfMessage):
    """The function that an earlier reply called; `arguments` are JSON, or what the model wrote
    instead."""

    name: str
    arguments: Arguments = "{}"


class CalledTool(_PartOfMessage):
    """The custom tool that an earlier reply called."""

    name: str
    input: str = ""


class ToolCall(_PartOfMessage):
    """A call in an earlier reply: of a function, or of a custom tool."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["function"]}, {"required": ["custom"]}]}
    )

    id: str | None = None
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | None = None
    custom: CalledTool | None = None

    @model_validator(mode="after")
    def _check_type(self) -> "ToolCall":
        if getattr(self, self.type) is None:
            raise refusal(f"A call of type {self.type} must have {self.type}.", self.type)
        return self

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates read it."""
        if self.custom is not None:
            function = called_with_text(self.custom.name, self.custom.input)
        else:
            assert self.function is not None
            function = self.function.model_dump()
        call = {"id": self.id, "type": "function", "function": function}
        return {key: value for key, value in call.items() if value is not None}


class ChatMessage(_PartOfMessage):
    """One message of the conversation, as given or as an earlier reply was returned."""

    model_config = ConfigDict(json_schema_extra=CONTENT_UNLESS_ASSISTANT)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "function_call": (),
        "audio": (),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] = ""
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same by its newer name."""
    refusal: str | None = None
    """What an earlier reply said instead of its content."""
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_other_forms(cls, data: Any) -> Any:
        """Thoughts that other servers put among the parts of an assistant's content are its
        reasoning. A tool may have given null."""
        if not isinstance(data, dict):
            return data
        content = data.get("content")
        if data.get("role") == "tool" and "content" in data and content is None:
            return {**data, "content": ""}
        if data.get("role") != "assistant" or not isinstance(content, list):
            return data
        thoughts = [text for part in content if (text := _thought_of(part)) is not None]
        if not thoughts:
            return data
        given = data.get("reasoning_content") or data.get("reasoning")
        others = [part for part in content if _thought_of(part) is None]
        return {
            **data,
            "content": others,
            "reasoning_content": given or "\n".join(filter(None, thoughts)),
        }

    @field_validator("role", mode="before")
    @classmethod
    def _refuse_function_role(cls, value: Any) -> Any:
        if value == "function":
            raise refusal("messages of role function are not supported; use role tool.")
        return value

    @field_validator("content", mode="before")
    @classmethod
    def _refuse_media(cls, value: Any) -> Any:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise refusal("content of a message must be a string or a list of text parts.")
        parts = [as_text_part(part) for part in value]
        for part in parts:
            kind = type_of(part)
            if isinstance(kind, str) and kind != "text":
                raise refusal(f"content of type {kind[:40]} is not supported yet.")
        return parts

    @model_validator(mode="after")
    def _check_content(self) -> "ChatMessage":
        check_content(self, self.role)
        return self

    @property
    def text(self) -> str:
        """The content, its parts joined."""
        content = self._all_content
        return content if isinstance(content, str) else "".join(part.text for part in content)

    @property
    def _all_content(self) -> str | list[TextPart]:
        """The content and the refusal, of which replies have one."""
        if not self.refusal:
            return self.content
        if isinstance(self.content, list):
            return [*self.content, TextPart(type="text", text=self.refusal)]
        return f"{self.content}\n{self.refusal}" if self.content else self.refusal

    def as_template_input(self) -> dict[str, Any]:
        """The message as the tokenizer takes it; the tokenizer joins the parts."""
        parts = self._all_content
        content = parts if isinstance(parts, str) else [part.model_dump() for part in parts]
        # Templates know "system"; "developer" is OpenAI's newer word for it.
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if (thought := self.reasoning_content or self.reasoning) is not None:
            message["reasoning_content"] = thought
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def as_text_part(part: Any) -> Any:
    """A part by its name in Responses, or a refusal, as a part of text."""
    kind = type_of(part)
    if kind in ("input_text", "output_text"):
        return {**part, "type": "text"}
    if kind == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return part


def _thought_of(part: Any) -> str | None:
    """The text of a part that is a thought (as Anthropic's and Mistral's servers have them); None
    if it isn't one."""
    kind = type_of(part)
    if kind == "redacted_thinking":
        return ""
    if kind not in ("thinking", "reasoning"):
        return None
    given = part.get("thinking") or part.get("reasoning") or part.get("text") or ""
    if isinstance(given, list):
        texts = [piece.get("text") for piece in given if isinstance(piece, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    return given if isinstance(given, str) else ""
