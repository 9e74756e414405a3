"""Responses: the tools that OpenAI defines and the client runs.

OpenAI's models were trained with these tools, so that a request has only their types. The model
here sees functions, with the parameters that are documented as the members of an item:
https://developers.openai.com/api/docs/guides/tools. A call of the model is JSON; the client gets an
item that has it as an object. Arguments that cannot be such an object reach the client unchanged,
as a ``function_call``: nothing is run that the model did not write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from json import dumps, loads

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.protocols.events import Document
from vllm_mlx_harmony.protocols.parameters import array, choice, fits, integer, record, string
from vllm_mlx_harmony.protocols.validation import repair


@dataclass(frozen=True, slots=True)
class LocalTool:
    """A tool that OpenAI defines and the client runs; ``name`` is for the model.

    Its calls are items of the type ``call``, whose ids begin with ``prefix``. If ``payload`` is
    a parameter, the item has that argument. Otherwise, its field ``payload`` has all arguments, and
    the ``defaults`` of others. ``fields`` are further fields of the item.
    """

    name: str
    description: str
    parameters: Document
    call: str
    prefix: str
    payload: str
    defaults: Document = field(default_factory=dict)
    fields: Document = field(default_factory=dict)

    def item(self, arguments: str) -> Document | None:
        """The fields of the item of a call; ``None`` if ``arguments`` do not fit."""
        value = _parsed(arguments)
        if not (isinstance(value, dict) and fits(value, self.parameters)):
            return None
        has_payload = self.payload in self.parameters["properties"]
        payload = value[self.payload] if has_payload else {**self.defaults, **value}
        return {self.payload: payload, **self.fields}

    def arguments(self, item: Mapping[str, object]) -> str | None:
        """The arguments of the call that ``item`` stands for; ``None`` if it has none.

        Clients add null fields to what they received.
        """
        payload = _without_nulls(item.get(self.payload))
        parameter = self.parameters["properties"].get(self.payload)
        is_list = parameter is not None and parameter.get("type") == "array"
        if not isinstance(payload, list if is_list else dict):
            return None
        arguments: Document = {self.payload: payload}
        if parameter is None:
            members = payload.items() if isinstance(payload, dict) else ()
            arguments = {k: v for k, v in members if (k, v) not in self.defaults.items()}
        return dumps(arguments, ensure_ascii=False, separators=(",", ":"))


def _parsed(arguments: str) -> object:
    """The value of ``arguments``; ``None`` for what cannot be sent. ``1.0`` is an integer, too."""

    def number(digits: str) -> float | int:
        value = float(digits)
        return int(value) if value.is_integer() else value

    try:
        return repair(loads(arguments or "{}", parse_float=number))
    except (ValueError, RecursionError, RequestError):
        return None


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


# --- Shells: https://developers.openai.com/api/docs/guides/tools-shell#local-shell-mode

_MILLISECONDS = integer("The time limit in milliseconds.")

_SHELL = LocalTool(
    "shell",
    "Runs commands in a shell on the user's computer, and returns their output.",
    record(
        {"commands": array(string(), "The commands to run, each as a line of the shell.")},
        {
            "timeout_ms": _MILLISECONDS,
            "max_output_length": integer("The number of characters of output to return."),
        },
    ),
    call="shell_call",
    prefix="sh",
    payload="action",
    defaults={"timeout_ms": None, "max_output_length": None},
    fields={"environment": {"type": "local"}},
)

_LOCAL_SHELL = LocalTool(
    "local_shell",
    "Runs a command on the user's computer, and returns its output.",
    record(
        {"command": array(string(), 'The program and its arguments: ["bash", "-lc", "ls"].')},
        {
            "env": {
                "type": "object",
                "additionalProperties": {"type": "string"},
            },
            "timeout_ms": _MILLISECONDS,
            "user": string("The user to run the command as."),
            "working_directory": string("The directory to run the command in."),
        },
    ),
    call="local_shell_call",
    prefix="lsh",
    payload="action",
    defaults={"type": "exec", "env": {}},
)


# --- Patches: https://developers.openai.com/api/docs/guides/tools-apply-patch

_PATH = string("The path of the file.")
_APPLY_PATCH = LocalTool(
    "apply_patch",
    "Creates, changes or deletes one file in the user's workspace.",
    record(
        {
            "operation": {
                "oneOf": [
                    record(
                        {
                            "type": choice("create_file"),
                            "path": _PATH,
                            "diff": string("The content; each line begins with +."),
                        }
                    ),
                    record(
                        {
                            "type": choice("update_file"),
                            "path": _PATH,
                            "diff": string(
                                "Hunks that begin with a line @@, or @@ and a line of the file "
                                "above the change. Then lines that begin with a space (context), "
                                "with - (removed) or with + (added)."
                            ),
                        }
                    ),
                    record({"type": choice("delete_file"), "path": _PATH}),
                ]
            }
        }
    ),
    call="apply_patch_call",
    prefix="apc",
    payload="operation",
)


# --- Computers: https://developers.openai.com/api/docs/guides/tools-computer-use

_POINT = {"x": integer(), "y": integer()}
_KEYS = {"keys": array(string(), "Keys that are held meanwhile.")}
_ACTION: Document = {
    "oneOf": [
        record(
            {
                "type": choice("click"),
                "button": choice("left", "right", "wheel", "back", "forward"),
                **_POINT,
            },
            _KEYS,
        ),
        record({"type": choice("double_click"), **_POINT}, _KEYS),
        record({"type": choice("drag"), "path": array(record(_POINT))}, _KEYS),
        record({"type": choice("keypress"), "keys": array(string())}),
        record({"type": choice("move"), **_POINT}, _KEYS),
        record({"type": choice("screenshot")}),
        record(
            {
                "type": choice("scroll"),
                **_POINT,
                "scroll_x": integer(),
                "scroll_y": integer(),
            },
            _KEYS,
        ),
        record({"type": choice("type"), "text": string()}),
        record({"type": choice("wait")}),
    ]
}


def _computer(payload: str, schema: Document) -> LocalTool:
    return LocalTool(
        "computer",
        "Uses the mouse, the keyboard and the screen of a computer.",
        record({payload: schema}),
        call="computer_call",
        prefix="cu",
        payload=payload,
        fields={"pending_safety_checks": []},
    )


LOCAL_TOOLS: Mapping[str, LocalTool] = {
    "shell": _SHELL,
    "local_shell": _LOCAL_SHELL,
    "apply_patch": _APPLY_PATCH,
    "computer": _computer("actions", array(_ACTION, "What to do, in this order.")),
    "computer_use_preview": _computer("action", _ACTION),
}
"""The tools by the types under which requests declare them."""

CALLS = frozenset(tool.call for tool in LOCAL_TOOLS.values())
"""The types of the items of their calls."""

OUTPUTS = frozenset(f"{call}_output" for call in CALLS)
"""The types of the items of the results."""


def types_of(item: Mapping[str, object]) -> tuple[str, ...]:
    """The types of the tools that ``item``, a call or a result, may belong to, likeliest first."""
    call = str(item.get("type")).removesuffix("_output")
    types = [kind for kind, tool in LOCAL_TOOLS.items() if tool.call == call]
    return (*sorted(types, key=lambda kind: item.get(LOCAL_TOOLS[kind].payload) is None),)


def types_chosen(choice_type: str) -> tuple[str, ...]:
    """The types of the tools that a ``tool_choice`` of the type ``choice_type`` may mean."""
    if choice_type in ("computer", "computer_use", "computer_use_preview"):
        return "computer", "computer_use_preview"
    return (choice_type,) if choice_type in LOCAL_TOOLS else ()


def described(kind: str, declared: Document) -> str:
    """The description of the tool of the type ``kind``, as the request has ``declared`` it."""
    about = LOCAL_TOOLS[kind].description
    width, height = declared.get("display_width"), declared.get("display_height")
    if isinstance(width, int) and isinstance(height, int):
        about += f" The screen has {width} x {height} pixels."
    system = declared.get("environment")
    return f"{about} It runs: {system}." if isinstance(system, str) else about
