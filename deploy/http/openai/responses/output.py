"""`OutputItems`: from the parts of an output to the items of a response, and their events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from deploy.http.generation.reading import OutputState
from deploy.http.parsers.parts import CallArguments, CallBegin, Part, Reasoning, Text

Event = dict[str, Any]
Status = Literal["completed", "incomplete"]


class OutputItems:
    """The items so far. Every method returns the events that it means for a stream, without their
    sequence numbers; replies in one piece don't need them."""

    def __init__(
        self, state: OutputState | None, wants_logprobs: bool, new_id: Callable[[str, int], str]
    ) -> None:
        """`state`: where ids of calls come from; `new_id` names an item by its number."""
        self.items: list[dict[str, Any]] = []
        """Complete but for the last, whose texts are in `_texts`."""
        self._state = state
        self._new_id = new_id
        self._wants_logprobs = wants_logprobs
        self._kind: type[Part] | None = None
        """Of the item that is open."""
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def add(self, part: Part, logprobs: list[dict[str, Any]]) -> list[Event]:
        """More of the output. `logprobs` are those of a text's tokens."""
        match part:
            case Text():
                events = [] if self._kind is Text else [*self.close(), *self._open_message()]
                self._texts.append(part.text)
                self._logprobs += logprobs
                delta = self._event("output_text.delta", content_index=0, delta=part.text)
                return [*events, {**delta, "logprobs": logprobs}]
            case Reasoning():
                is_open = self._kind is Reasoning
                events = [] if is_open else [*self.close(), *self._open_reasoning()]
                self._texts.append(part.text)
                delta = self._event("reasoning_text.delta", content_index=0, delta=part.text)
                return [*events, delta]
            case CallBegin():
                return [*self.close(), *self._open_call(part)]
            case CallArguments():
                self._texts.append(part.text)
                return [self._event(f"{self._arguments_event}.delta", delta=part.text)]

    def close(self, status: Status = "completed") -> list[Event]:
        """End the last item, if it is open. Reasoning is complete once its end was written,
        whatever became of the answer."""
        if self._kind is None:
            return []
        if self._kind is Reasoning and self._state is not None:
            status = "incomplete" if self._state.is_within_reasoning else "completed"
        item, text = self.items[-1], "".join(self._texts)
        item["status"] = status
        events: list[Event] = []
        if self._kind is CallBegin:
            field = "input" if item["type"] == "custom_tool_call" else "arguments"
            item[field] = text
            events.append(self._event(f"{self._arguments_event}.done", **{field: text}))
        else:
            name, part = "reasoning_text", _reasoning(text)
            extra: dict[str, Any] = {}
            if self._kind is Text:
                name, part = "output_text", self._text(text, self._logprobs)
                extra = {"logprobs": self._logprobs}
            item["content"] = [part]
            done = self._event(f"{name}.done", content_index=0, text=text)
            events += [done | extra, self._event("content_part.done", content_index=0, part=part)]
        self._kind, self._texts, self._logprobs = None, [], []
        events.append(
            {
                "type": "response.output_item.done",
                "output_index": len(self.items) - 1,
                "item": item,
            }
        )
        return events

    def _open_message(self) -> list[Event]:
        item = {"id": self._id("msg"), "type": "message", "role": "assistant", "content": []}
        return [*self._open(Text, item), self._part_added(self._text("", []))]

    def _open_reasoning(self) -> list[Event]:
        item = {"id": self._id("rs"), "type": "reasoning", "summary": [], "content": []}
        return [*self._open(Reasoning, item), self._part_added(_reasoning(""))]

    def _open_call(self, begin: CallBegin) -> list[Event]:
        assert self._state is not None
        tool = self._state.function(begin.call)
        item = {
            "id": self._id("ctc" if tool.takes_text else "fc"),
            "type": "custom_tool_call" if tool.takes_text else "function_call",
            "call_id": self._state.call_id(begin),
            "name": tool.name,
            "input" if tool.takes_text else "arguments": "",
        }
        if tool.namespace:
            item["namespace"] = tool.namespace
        return self._open(CallBegin, item)

    def _id(self, kind: str) -> str:
        """Of the next item."""
        return f"{kind}_{self._new_id('item', len(self.items))}"

    @property
    def _arguments_event(self) -> str:
        """The name of the events that hold the arguments of the call that is open."""
        of_text = self.items[-1]["type"] == "custom_tool_call"
        return "custom_tool_call_input" if of_text else "function_call_arguments"

    def _open(self, kind: type[Part], item: dict[str, Any]) -> list[Event]:
        self._kind = kind
        self.items.append(item)
        item["status"] = "in_progress"
        index = len(self.items) - 1
        # The item goes on changing; events may be encoded later.
        return [{"type": "response.output_item.added", "output_index": index, "item": dict(item)}]

    def _part_added(self, part: dict[str, Any]) -> Event:
        return self._event("content_part.added", content_index=0, part=part)

    def _event(self, kind: str, **fields: Any) -> Event:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{kind}", **place, **fields}

    def _text(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": []}
        return part | ({"logprobs": logprobs} if self._wants_logprobs else {})


def _reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}
