"""Messages of a conversation, as `POST /v1/chat/completions` has them."""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from deploy.http.body import FreeObject, Strict, refusal
from deploy.http.generation.tool_use import called_with_text


class _PartOfMessage(Strict):
    """Unknown keys are ignored, as in vLLM: clients decorate what they send back."""

    model_config = ConfigDict(extra="ignore")


class TextPart(_PartOfMessage):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(_PartOfMessage):
    """The function that an earlier reply called; `arguments` are JSON."""

    name: str
    arguments: str | FreeObject = "{}"


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

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"role": {"const": "assistant"}}},
                {"required": ["content"]},
            ]
        }
    )
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
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: str | None = None

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
        for part in value:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise refusal(f"content of type {kind[:40]} is not supported yet.")
        return value

    @model_validator(mode="after")
    def _check_content(self) -> "ChatMessage":
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise refusal(f"A {self.role} message must have content.", "content")
        return self

    @property
    def text(self) -> str:
        """The content, its parts joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)

    def as_template_input(self) -> dict[str, Any]:
        """The message as the tokenizer takes it; the tokenizer joins the parts."""
        parts = self.content
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
