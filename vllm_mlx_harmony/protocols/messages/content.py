"""The Messages API: the text of content blocks (semantics A5, A11)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_mlx_harmony.core.attachments import Attachments, placeholder
from vllm_mlx_harmony.core.errors import RequestError, quoted
from vllm_mlx_harmony.protocols.messages.schema import (
    Block,
    ContentSource,
    DocumentBlock,
    SearchResultBlock,
    TextBlock,
    TextSource,
    ToolReferenceBlock,
)
from vllm_mlx_harmony.protocols.validation import unsupported

FILES = {
    "image": "image",
    "audio": "audio",
    "video": "video",
    "document": "file",
    "container_upload": "file",
}
"""The types of attachments, and the kind of each."""

_MISPLACED = ("thinking", "redacted_thinking", "tool_use", "tool_result")


def unreadable(kind: str, where: str) -> RequestError:
    why = "which is not allowed here" if kind in _MISPLACED else "which is not supported"
    return unsupported(where, f"{where} is of type {quoted(kind)}, {why}")


@dataclass(frozen=True, slots=True)
class TextReader:
    """Reads blocks as text; ``where`` is always the path of a block, or of a list of them.

    ``lenient``: a line of text replaces a block of a type that is not supported, as in results of
    tools. Otherwise, and for attachments that the server rejects, raises ``RequestError``.
    """

    attachments: Attachments
    lenient: bool = False

    def text(self, block: Block, where: str) -> str:
        """A text, or the title, the source and the text of a document or search result, in lines.

        An attachment is replaced by a line.
        """
        match block:
            case TextBlock():
                return block.text
            case ToolReferenceBlock():
                return block.tool_name
            case SearchResultBlock():
                content = self.texts(block.content, f"{where}.content")
                return lines(_headed(block.title, "Source", block.source, content))
            case DocumentBlock(source=TextSource(data=data)):
                content = data
            case DocumentBlock(source=ContentSource(content=parts)):
                content = self.texts(parts, f"{where}.source.content")
            case _ if block.type in FILES:
                content = self.attachments.line(FILES[block.type], block.type, where)
            case _ if self.lenient:
                content = placeholder(block.type)
            case _:
                raise unreadable(block.type, where)
        if isinstance(block, DocumentBlock):
            return lines(_headed(block.title, "Context", block.context, content))
        return content

    def texts(self, blocks: Iterable[Block], where: str) -> str:
        return lines(self.text(block, f"{where}[{at}]") for at, block in enumerate(blocks))


def _headed(title: str | None, name: str, origin: str | None, text: str) -> list[str]:
    heading = {"Title": title, name: origin}
    return [*(f"{key}: {value}" for key, value in heading.items() if value), text]


def lines(texts: Iterable[str]) -> str:
    """Blocks are separate texts: each begins on a line of its own."""
    joined = ""
    for text in texts:
        joined += f"\n{text}" if joined and not joined.endswith("\n") else text
    return joined
