"""The Messages API: every type of tool that Anthropic defines, and what it is here.

Anthropic's models were trained with these tools, so that requests have only their types. Those that
the client runs (``CLIENT_TOOLS``) are functions here. Their parameters are those that Anthropic
documents: https://platform.claude.com/docs/en/agents-and-tools/tool-use/overview
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from vllm_mlx_harmony.protocols.events import Document
from vllm_mlx_harmony.protocols.parameters import (
    array,
    boolean,
    choice,
    integer,
    number,
    record,
    string,
)


@dataclass(frozen=True, slots=True)
class ClientToolType:
    """A tool that Anthropic defines and the client runs."""

    name: str
    description: str
    parameters: Document


# --- bash: https://platform.claude.com/docs/en/agents-and-tools/tool-use/bash-tool

_BASH = ClientToolType(
    "bash",
    "Runs a command in a bash session, which keeps its state between calls.",
    record(
        {},
        {
            "command": string("The command to run; required unless restart is true."),
            "restart": boolean("True starts a new session."),
        },
    ),
)


# --- Text editors: https://platform.claude.com/docs/en/agents-and-tools/tool-use/text-editor-tool


def _editor(name: str, inserted: str, *more_commands: str) -> ClientToolType:
    """A text editor. ``inserted`` is the parameter that has the text of the command ``insert``.

    In the API it is ``insert_text`` for Claude 4, whatever the page above said for a long time:
    https://github.com/anthropics/anthropic-sdk-python/issues/1155
    """
    parameters = record(
        {
            "command": choice("view", "create", "str_replace", "insert", *more_commands),
            "path": string("The path of the file, or of the directory to view."),
        },
        {
            "view_range": array(
                integer(), "view: the first and the last line to show, from 1; -1 is the end."
            ),
            "file_text": string("create: the content of the new file."),
            "old_str": string("str_replace: the text to replace; it must be unique in the file."),
            "new_str": string("str_replace: the replacement; empty if omitted."),
            "insert_line": integer("insert: the line after which to insert; 0 is the beginning."),
            inserted: string(
                "insert: the text to insert."
                if inserted == "insert_text"
                else "str_replace: the replacement; empty if omitted. insert: the text to insert."
            ),
        },
    )
    return ClientToolType(name, "Views, creates and edits text files.", parameters)


_OLD_EDITOR = _editor("str_replace_editor", "new_str", "undo_edit")
_EDITOR = _editor("str_replace_based_edit_tool", "insert_text")


# --- Memory: https://platform.claude.com/docs/en/agents-and-tools/tool-use/memory-tool

_MEMORY = ClientToolType(
    "memory",
    "Keeps notes in files below /memories, which outlast this conversation. View the directory "
    "before you begin a task.",
    record(
        {"command": choice("view", "create", "str_replace", "insert", "delete", "rename")},
        {
            "path": string("The file or directory below /memories; for every command but rename."),
            "view_range": array(integer(), "view: the first and the last line to show."),
            "file_text": string("create: the content of the file."),
            "old_str": string("str_replace: the text to replace."),
            "new_str": string("str_replace: the replacement."),
            "insert_line": integer("insert: the line after which to insert."),
            "insert_text": string("insert: the text to insert."),
            "old_path": string("rename: the present path."),
            "new_path": string("rename: the new path."),
        },
    ),
)


# --- Computer: https://platform.claude.com/docs/en/agents-and-tools/tool-use/computer-use-tool

_ACTIONS = (
    *("screenshot", "left_click", "right_click", "middle_click", "double_click"),
    *("left_click_drag", "mouse_move", "cursor_position", "type", "key"),
)
_LATER_ACTIONS = (
    *("triple_click", "left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait"),
)
_LATER_PARAMETERS: Mapping[str, Document] = {
    "start_coordinate": array(integer(), "left_click_drag: where the drag begins: [x, y]."),
    "scroll_direction": choice("up", "down", "left", "right", description="scroll: where to."),
    "scroll_amount": integer("scroll: the number of clicks of the wheel."),
    "duration": number("hold_key, wait: the time in seconds."),
}
_REGION: Mapping[str, Document] = {
    "region": array(integer(), "zoom: the part of the screen to show: [x0, y0, x1, y1].")
}


def _computer(actions: tuple[str, ...], parameters: Mapping[str, Document]) -> ClientToolType:
    common = {
        "coordinate": array(integer(), "Where to click, move or scroll: [x, y] in pixels."),
        "text": string("type: the text; key, hold_key: the keys, such as ctrl+s."),
    }
    return ClientToolType(
        "computer",
        "Uses the mouse, the keyboard and the screen of a computer.",
        record({"action": choice(*actions)}, {**common, **parameters}),
    )


_OLD_COMPUTER = _computer(_ACTIONS, {})
_COMPUTER = _computer((*_ACTIONS, *_LATER_ACTIONS), _LATER_PARAMETERS)
_ZOOMING_COMPUTER = _computer(
    (*_ACTIONS, *_LATER_ACTIONS, "zoom"), {**_LATER_PARAMETERS, **_REGION}
)


# --- All types.

CLIENT_TOOLS: Mapping[str, ClientToolType] = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _OLD_EDITOR,
    "text_editor_20250124": _OLD_EDITOR,
    "text_editor_20250429": _EDITOR,
    "text_editor_20250728": _EDITOR,
    "memory_20250818": _MEMORY,
    "computer_20241022": _OLD_COMPUTER,
    "computer_20250124": _COMPUTER,
    "computer_20251124": _COMPUTER,
}

SERVER_TOOLS: Mapping[str, str] = {
    **dict.fromkeys(
        ("web_search_20250305", "web_search_20260209", "web_search_20260318"), "web_search"
    ),
    **dict.fromkeys(
        (
            "web_fetch_20250910",
            "web_fetch_20260209",
            "web_fetch_20260309",
            "web_fetch_20260318",
        ),
        "web_fetch",
    ),
    **dict.fromkeys(
        (
            "code_execution_20250522",
            "code_execution_20250825",
            "code_execution_20260120",
            "code_execution_20260521",
        ),
        "code_execution",
    ),
    "advisor_20260301": "advisor",
}
"""The types that Anthropic's servers run, each with the name of its calls and results."""

WEB_TOOLS = WEB_SEARCH, WEB_FETCH = ("web_search", "web_fetch")
"""Those of them that the server runs itself if it has a browser."""

CLIENT_TOOLSETS = ("computer_toolset_20260801", "browser_toolset_20260801")
"""Sets of tools that the client runs and that are not offered to the model: almost all of their
results are screenshots, which it cannot see."""


def client_tool(kind: str, declared: Document) -> ClientToolType:
    """The tool of the type ``kind`` in ``CLIENT_TOOLS``, as the request has ``declared`` it."""
    tool = CLIENT_TOOLS[kind]
    if tool.name != "computer":
        return tool
    if kind == "computer_20251124" and declared.get("enable_zoom") is True:
        tool = _ZOOMING_COMPUTER
    width, height = declared.get("display_width_px"), declared.get("display_height_px")
    if not (isinstance(width, int) and isinstance(height, int)):
        return tool
    screen = f"{tool.description} The screen has {width} x {height} pixels."
    return replace(tool, description=screen)
