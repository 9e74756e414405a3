"""Parameters of agents' tools and typed answers, as different libraries write JSON Schema.

A shape describes values once: a mapping is an object whose properties with a ``?`` are optional,
and a list is an array. Shapes are written in the dialects of common schema generators, with values
that fit and values that almost fit.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias
from zlib import crc32

Shape: TypeAlias = Any
Schema: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Of:
    """A scalar with a schema of its own, and examples."""

    schema: Mapping[str, Any]
    examples: tuple[Any, ...]


@dataclass(frozen=True)
class Choice:
    """One of several shapes."""

    of: tuple[Shape, ...]


@dataclass(frozen=True)
class Map:
    """An object with any names, or with the listed ones."""

    of: Shape
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pair:
    """An array of two items, of which the last may be missing."""

    of: tuple[Shape, Shape]


@dataclass(frozen=True)
class Many:
    """An array of some length."""

    of: Shape
    least: int = 0
    most: int | None = None


@dataclass(frozen=True)
class Named:
    """A reference to a named shape, also from itself."""

    name: str


S = Of({"type": "string"}, ("main.py", 'Grüße, "Welt"\n', ""))
B = Of({"type": "boolean"}, (True, False))
N = Of({"type": "number"}, (0.5, -3, 1e3))
NULL = Of({"type": "null"}, (None,))
URL = Of({"type": "string", "format": "uri"}, ("https://example.com/a?b=c",))
DAY = Of({"type": "string", "format": "date"}, ("2026-11-22",))
TIME = Of({"type": "string", "format": "date-time"}, ("2026-11-22T09:30:00Z",))
MAIL = Of({"type": "string", "format": "email"}, ("ada@example.com",))
UUID = Of({"type": "string", "format": "uuid"}, ("123e4567-e89b-42d3-a456-426614174000",))


def whole(least: int | None = None, most: int | None = None) -> Of:
    limits = {"minimum": least, "maximum": most}
    limits = {keyword: value for keyword, value in limits.items() if value is not None}
    examples = [bound for bound in (least, most, 7) if bound is not None]
    if least is not None:
        examples = [bound for bound in examples if bound >= least]
    if most is not None:
        examples = [bound for bound in examples if bound <= most]
    return Of({"type": "integer", **limits}, (*examples,))


def decimal(least: float, most: float) -> Of:
    return Of({"type": "number", "minimum": least, "maximum": most}, (least, most))


def one_of(*values: Any) -> Of:
    return Of({"enum": [*values]}, values)


def text(pattern: str, *examples: str) -> Of:
    return Of({"type": "string", "pattern": pattern}, examples)


def short(most: int, least: int = 0) -> Of:
    return Of({"type": "string", "minLength": least, "maxLength": most}, ("x" * most, "é" * least))


def maybe(shape: Shape) -> Choice:
    return Choice((shape, NULL))


I = whole()  # noqa: E741
PLACE = {"lat": decimal(-90, 90), "lon": decimal(-180, 180), "label?": S}
MONEY = {
    "amount": text(r"^-?[0-9]+\.[0-9]{2}$", "12.50", "-0.01"),
    "currency": one_of("EUR", "USD"),
}
PERSON = {"name": short(40, 1), "email?": MAIL, "phone?": text(r"^\+[0-9]{6,15}$", "+4930123456")}
ADDRESS = {"street": S, "city": S, "zip": text("^[0-9]{5}$", "10115"), "country?": short(2, 2)}

SHAPES: Mapping[str, Shape] = {
    # files and code
    "read": {"file_path": S, "offset?": whole(0), "limit?": whole(1, 2000)},
    "write": {"file_path": S, "content": S},
    "edit": {"file_path": S, "old_string": S, "new_string": S, "replace_all?": B},
    "multi_edit": {"file_path": S, "edits": Many({"old": S, "new": S, "all?": B}, 1)},
    "glob": {"pattern": short(200, 1), "path?": S},
    "grep": {"pattern": S, "path?": S, "glob?": S, "output_mode?": one_of("content", "files",
        "count"), "-A?": whole(0), "-B?": whole(0), "-i?": B, "multiline?": B,
        "head_limit?": whole(1)},
    "list_directory": {"path": S, "depth?": whole(1, 10), "ignore?": [S]},
    "move_files": {"moves": Many({"from": S, "to": S}, 1, 5), "overwrite?": B},
    "shell": {"command": Many(S, 1), "workdir?": S, "timeout_ms?": whole(0, 600000),
        "env?": Map(S)},
    "bash": {"command": S, "description?": short(80, 5), "run_in_background?": B, "timeout?": N},
    "apply_patch": {"input": S},
    "notebook_edit": {"notebook_path": S, "cell_id?": S, "new_source": S,
        "cell_type?": one_of("code", "markdown"), "edit_mode?": one_of("replace", "insert",
        "delete")},
    "todo_write": {"todos": [{"content": short(60, 1), "active_form": S, "id": S,
        "status": one_of("pending", "in_progress", "completed"), "priority?": one_of(1, 2, 3)}]},
    "update_plan": {"explanation?": S, "plan": [{"step": S, "status": one_of("todo", "done")}]},
    "task": {"description": S, "prompt": S, "subagent_type": one_of("general", "search", "review")},
    "lsp_rename": {"uri": URL, "position": {"line": whole(0), "character": whole(0)}, "new_name":
        text("^[A-Za-z_][A-Za-z0-9_]*$", "value_2", "_")},
    "code_review": {"findings": [{"title": short(80), "severity": one_of("low", "high"), "file": S,
        "lines": {"start": whole(1), "end": whole(1)}, "confidence": decimal(0, 1)}], "ok": B},
    "git_commit": {"message": short(72, 1), "files?": [S], "amend?": B, "author?": maybe(PERSON)},
    "git_log": {"max_count?": whole(1, 100), "since?": DAY, "paths?": [S], "format?":
        one_of("oneline", "full")},
    "run_tests": {"target": Choice((S, [S])), "marks?": Map(B), "workers?": Choice((whole(1, 64),
        one_of("auto")))},
    # services of developers
    "create_issue": {"owner": S, "repo": S, "title": S, "body?": S, "labels?": [S], "assignees?":
        Many(S, 0, 10), "milestone?": maybe(whole(1))},
    "search_issues": {"q": S, "sort?": one_of("comments", "created", "updated"), "order?":
        one_of("asc", "desc"), "page?": whole(1), "per_page?": whole(1, 100)},
    "create_pull_request": {"title": S, "head": S, "base": S, "draft?": B, "reviewers?": [S]},
    "ci_trigger": {"workflow": S, "ref": S, "inputs?": Map(Choice((S, B, N)))},
    "jira_transition": {"key": text("^[A-Z]+-[0-9]+$", "ABC-12"), "to": S, "fields?": Map(S)},
    "sentry_query": {"project": S, "level?": [one_of("error", "warning", "info")], "since": TIME},
    "kubectl_get": {"kind": one_of("pod", "service", "node"), "namespace?": S, "selector?": Map(S)},
    "docker_run": {"image": S, "ports?": [{"host": whole(1, 65535), "container": whole(1, 65535),
        "protocol?": one_of("tcp", "udp")}], "volumes?": Map(S), "detach?": B},
    "deploy": {"service": S, "replicas": whole(0, 50),
        "strategy": Choice(({"kind": one_of("rolling"), "surge": whole(1)},
        {"kind": one_of("canary"), "share": decimal(0, 1)}))},
    "set_alert": {"metric": S, "op": one_of(">", "<", ">=", "<="), "value": N, "window":
        text("^[0-9]+[smh]$", "5m"), "channels": Many(one_of("mail", "pager"), 1, 2)},
    "dns_record": {"zone": S, "type": one_of("A", "AAAA", "TXT"), "ttl?": whole(60, 86400),
        "values": Many(S, 1)},
    "log_search": {"query": S, "from": TIME, "to": TIME, "fields?": [S], "limit?": whole(1, 1000)},
    "sql": {"statement": S, "parameters?": [Choice((S, N, B, NULL))], "read_only": B},
    "filter_rows": {"where": Named("filter"), "limit?": whole(0)},
    "vector_search": {"embedding": Many(N, 3, 3), "k": whole(1, 100), "filter?": Map(S)},
    "http_request": {"method": one_of("GET", "POST", "PUT"), "url": URL, "headers?": Map(S),
        "body?": Choice((S, Map(S), NULL))},
    "feature_flag": {"flag": text("^[a-z][a-z0-9-]*$", "new-ui", "x"), "rules": [{"percent":
        whole(0, 100), "segments?": [S]}], "default": B},
    # the web
    "web_search": {"query": S, "domains?": Many(S, 0, 5), "recency_days?": maybe(whole(1))},
    "web_fetch": {"url": URL, "prompt?": S, "max_bytes?": whole(1)},
    "browser_click": {"ref": S, "button?": one_of("left", "right"), "modifiers?": [one_of("Alt",
        "Shift")], "double?": B},
    "browser_type": {"ref": S, "text": S, "submit?": B, "delay_ms?": whole(0, 1000)},
    "fill_form": {"fields": [{"name": S, "type": one_of("textbox", "checkbox"), "value": Choice((S,
        B))}]},
    "computer": {"action": one_of("click", "type", "scroll", "wait"), "coordinate?": maybe(Many(
        whole(0), 2, 2)), "text?": maybe(S), "duration?": maybe(decimal(0, 30))},
    "screenshot": {},
    "sitemap": {"pages": [{"url": URL, "changed?": DAY, "priority?": decimal(0, 1)}]},
    # people
    "send_email": {"to": Many(MAIL, 1), "cc?": [MAIL], "subject": short(120), "body": S,
        "attachments?": [{"name": S, "url": URL}]},
    "create_event": {"title": S, "start": TIME, "end": TIME, "attendees?": [PERSON], "location?":
        maybe(Choice((S, PLACE))), "reminders?": [{"minutes": whole(0), "by": one_of("mail",
        "popup")}], "recurrence?": {"every": one_of("day", "week"), "count": whole(1, 52)}},
    "post_message": {"channel": text("^[#@].+$", "#general"), "text": S, "thread_ts?": S,
        "blocks?": [ Choice(({"type": one_of("section"), "text": S},
        {"type": one_of("divider")}))]},
    "contact_lookup": {"by": Choice(({"email": MAIL}, {"phone": S}, {"id": UUID}))},
    "handoff": {"to": one_of("billing", "support"), "reason": S, "context?": Map(S)},
    "ask_user": {"questions": Many({"question": S, "header": short(12), "options": Many({"label": S,
        "description?": S}, 2, 4), "multi": B}, 1, 4)},
    "memory": {"entities": [{"name": S, "type": S, "observations": [S]}], "relations?": [{"from": S,
        "to": S, "kind": S}]},
    "schedule_meeting": {"participants": Many(S, 2, 20), "duration": one_of(15, 30, 45, 60),
        "window": {"from": DAY, "to": DAY}},
    "survey": {"answers": Map(whole(1, 5), ("service", "food", "price")), "comment?": S},
    # the world
    "get_weather": {"city": S, "unit?": one_of("celsius", "fahrenheit"), "days?": whole(1, 14)},
    "route": {"from": PLACE, "to": PLACE, "via?": Many(PLACE, 0, 3), "mode": one_of("car", "foot"),
        "avoid?": [one_of("tolls", "ferries")]},
    "book_flight": {"passengers": Many({"name": S, "born": DAY, "seat?": text("^[0-9]{1,2}[A-F]$",
        "12A")}, 1, 9), "legs": Many({"from": short(3, 3), "to": short(3, 3), "on": DAY}, 1),
        "cabin?": one_of("economy", "business")},
    "set_light": {"room": S, "on": B, "brightness?": whole(0, 100), "color?": Choice((text(
        "^#[0-9a-f]{6}$", "#ff8800"), {"hue": whole(0, 359), "saturation": decimal(0, 1)}))},
    "thermostat": {"schedule": Map({"target": decimal(5, 30), "mode?": one_of("heat", "cool")},
        ("mon", "tue", "wed"))},
    "order_food": {"items": Many({"sku": S, "count": whole(1, 20), "notes?": S, "extras?": [S]}, 1),
        "address": ADDRESS, "tip?": maybe(MONEY)},
    "transfer": {"from": S, "to": S, "money": MONEY, "reference?": short(140), "on?": maybe(DAY)},
    "stock_quote": {"symbols": Many(text("^[A-Z.]{1,6}$", "BRK.B", "X"), 1, 10), "range?":
        one_of("1d", "1mo", "1y")},
    "convert": {"value": N, "from": S, "to": S, "digits?": whole(0, 12)},
    "calculate": {"expression": Named("expression")},
    "translate": {"text": S, "target": text("^[a-z]{2}(-[A-Z]{2})?$", "de", "pt-BR"), "formal?": B},
    "generate_image": {"prompt": short(1000, 1), "size?": one_of("1024x1024", "512x512"),
        "n?": whole(1, 4), "seed?": maybe(I)},
    "play_music": {"what": Choice(({"track": S, "artist?": S}, {"playlist": S}, {"genre": S})),
        "volume?": whole(0, 11), "shuffle?": B},
    "chart": {"kind": one_of("line", "bar"), "title?": S, "x": [Choice((S, N))],
        "series": Many({"name": S, "values": [maybe(N)]}, 1)},
    # typed answers
    "invoice": {"number": S, "issued": DAY, "seller": {"name": S, "address": ADDRESS, "vat?": S},
        "lines": Many({"text": S, "quantity": N, "price": MONEY}, 1), "total": MONEY, "paid": B},
    "resume": {"person": PERSON, "skills": [S], "jobs": [{"title": S, "company": S, "from": DAY,
        "to": maybe(DAY)}], "degree?": one_of("bachelor", "master", "doctor")},
    "entities": {"entities": [{"text": S, "kind": one_of("person", "place", "date"), "span":
        Many(whole(0), 2, 2)}]},
    "sentiment": {"label": one_of("positive", "neutral", "negative"), "score": decimal(-1, 1)},
    "recipe": {"title": S, "serves": whole(1, 12), "ingredients": [{"name": S, "amount?": N,
        "unit?": maybe(one_of("g", "ml"))}], "steps": Many(S, 1)},
    "classification": {"labels": Map(decimal(0, 1), ("spam", "ham")), "language": short(2, 2)},
    "outline": {"root": Named("section")},
    "translation_pairs": {"pairs": [Many(S, 2, 2)], "source": S},
    "quiz": {"questions": Many({"text": S, "choices": Many(S, 2, 4), "answer": whole(0, 3)}, 1, 3)},
    "steps": {"steps": [{"explanation": S, "output": S}], "final_answer": S},
    "ui": {"type": one_of("div", "button"), "label": S, "children?": [Named("element")]},
    "route_request": {"route": Choice(({"kind": one_of("refund"), "order": S, "amount?": MONEY},
        {"kind": one_of("faq"), "topic": S}, {"kind": one_of("human")}))},
    "größen": {"größe": N, "名前": S, "naïve?": B, "with space": I, "a\"b?": S, "$ref?": S},
}  # fmt: skip

NAMED: Mapping[str, Shape] = {
    "filter": Choice(({"and": [Named("filter")]}, {"field": S, "op": one_of("=", "<"), "value":
        Choice((S, N))})),
    "expression": Choice((N, {"op": one_of("+", "*"), "args": Many(Named("expression"), 1, 3)})),
    "section": {"heading": S, "level": whole(1, 6), "sections": [Named("section")]},
    "element": {"type": one_of("div", "button"), "children?": [Named("element")]},
}  # fmt: skip


# --- as JSON Schema ---


@dataclass(frozen=True)
class Dialect:
    """How a library or a person writes schemas."""

    name: str
    all_required: bool = False
    """Optional properties are required, but may be null."""
    closed: bool = True
    """No other properties."""
    referred: bool = False
    """Objects are definitions, and referred to."""
    titled: bool = False
    definitions: str = "$defs"
    union: str = "anyOf"
    """The keyword of a discriminated union."""
    root: Mapping[str, Any] = field(default_factory=dict)


DIALECTS = (
    Dialect("by hand", closed=False, union="oneOf"),
    Dialect("zod", root={"$schema": "https://json-schema.org/draft/2020-12/schema"}),
    Dialect("pydantic", closed=False, referred=True, titled=True, union="oneOf"),
    Dialect("strict", all_required=True, referred=True),
    Dialect("draft 7", titled=True, definitions="definitions",
        root={"$schema": "http://json-schema.org/draft-07/schema#"}),
)  # fmt: skip


def schema_of(shape: Shape, dialect: Dialect) -> Schema:
    """``shape`` in ``dialect``."""
    return _Writer(dialect).root(shape)


class _Writer:
    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._definitions: dict[str, Schema] = {}

    def root(self, shape: Shape) -> Schema:
        schema = self._object(shape)
        if self._definitions:
            schema[self._dialect.definitions] = self._definitions
        return {**self._dialect.root, **schema}

    def _of(self, shape: Shape) -> Schema:
        out: Schema
        if isinstance(shape, Of):
            out = copy.deepcopy(dict(shape.schema))
        elif isinstance(shape, Choice):
            out = self._union(shape.of)
        elif isinstance(shape, Map):
            names = {"propertyNames": self._names(shape.names)} if shape.names else {}
            out = {"type": "object", **names, "additionalProperties": self._of(shape.of)}
        elif isinstance(shape, Pair):
            out = {"type": "array", "prefixItems": [*map(self._of, shape.of)], "items": False}
        elif isinstance(shape, list):
            out = self._of(Many(shape[0]))
        elif isinstance(shape, Many):
            bounds = {"minItems": shape.least or None, "maxItems": shape.most}
            limits = {key: bound for key, bound in bounds.items() if bound is not None}
            out = {"type": "array", "items": self._of(shape.of), **limits}
        elif isinstance(shape, Named):
            out = self._reference(shape.name, lambda: self._of(NAMED[shape.name]))
        elif self._dialect.referred:
            name = f"Object{crc32(repr(shape).encode())}"
            out = self._reference(name, lambda: self._object(shape))
        else:
            out = self._object(shape)
        return out

    def _reference(self, name: str, write: Callable[[], Schema]) -> Schema:
        if name not in self._definitions:
            self._definitions[name] = {}
            self._definitions[name].update(write())
        return {"$ref": f"#/{self._dialect.definitions}/{name}"}

    def _names(self, names: Sequence[str]) -> Schema:
        enum_schema: Schema = {"type": "string", "enum": [*names]}
        if not self._dialect.referred:
            return enum_schema
        return self._reference(f"Names_{'_'.join(names)}", lambda: enum_schema)

    def _union(self, options: Sequence[Shape]) -> Schema:
        schemas = [self._of(option) for option in options]
        if self._dialect.name == "by hand" and all(schema.keys() == {"type"} for schema in schemas):
            types = [
                [kind] if isinstance(kind := schema["type"], str) else kind for schema in schemas
            ]
            return {"type": [*dict.fromkeys(chain.from_iterable(types))]}
        is_discriminated = all(
            isinstance(option, dict) and {"kind", "type"} & {*option} for option in options
        )
        return {self._dialect.union if is_discriminated else "anyOf": schemas}

    def _object(self, shape: Mapping[str, Shape]) -> Schema:
        properties, required = {}, []
        for key, inner in shape.items():
            name, optional = key.removesuffix("?"), key.endswith("?")
            nullable = optional and (self._dialect.all_required or self._dialect.titled)
            schema = self._union((inner, NULL)) if nullable else self._of(inner)
            if self._dialect.titled:
                schema = {"title": name.title(), **schema}
                if optional:
                    schema["default"] = None
            properties[name] = schema
            if not optional or self._dialect.all_required:
                required.append(name)
        out: Schema = {"type": "object", "properties": properties}
        if required or self._dialect.all_required:
            out["required"] = required
        return {**out, "additionalProperties": False} if self._dialect.closed else out


# --- values ---


def fitting(shape: Shape, dialect: Dialect, chance: random.Random, depth: int = 0) -> Any:  # noqa: C901 - a case for each shape
    """A random value of ``shape``."""

    def inner(inner_shape: Shape) -> Any:
        return fitting(inner_shape, dialect, chance, depth + 1)

    value: Any
    if isinstance(shape, Of):
        value = chance.choice(shape.examples)
    elif isinstance(shape, Named):
        value = inner(NAMED[shape.name])
    elif isinstance(shape, Choice):
        flat = [inner_shape for inner_shape in shape.of if "Named" not in repr(inner_shape)]
        value = inner(chance.choice(flat if flat and depth > 2 else shape.of))
    elif isinstance(shape, Map):
        names = shape.names or ("", "Content-Type", "größe")
        value = {name: inner(shape.of) for name in names if chance.random() < 0.6}
    elif isinstance(shape, Pair):
        value = [*map(inner, shape.of)][: chance.randrange(3)]
    elif isinstance(shape, list):
        value = [] if depth > 4 else [inner(shape[0]) for _ in range(chance.randrange(3))]
    elif isinstance(shape, Many):
        most = shape.least + 2 if shape.most is None else min(shape.most, 4)
        value = [inner(shape.of) for _ in range(chance.randint(shape.least, most))]
    else:
        value = {}
        for key, inner_shape in shape.items():
            name, is_present = key.removesuffix("?"), not key.endswith("?") or chance.random() < 0.5
            if is_present and not (
                depth > 4 and "Named" in repr(inner_shape) and key.endswith("?")
            ):
                value[name] = inner(inner_shape)
            elif dialect.all_required:
                value[name] = None
    return value


def drawn(chance: random.Random, depth: int = 0) -> Shape:
    """A random shape, with others in it."""

    def inner() -> Shape:
        return drawn(chance, depth + 1)

    kind = chance.choice((Of, Many, Pair, Map, Choice, dict, dict))
    if depth > 2 or kind is Of:
        low, high = sorted((chance.randrange(-50, 2000), chance.randrange(2000)))
        numbers = N, I, whole(low, high), decimal(low / 8, high)
        texts = S, short(3, 1), text("^[a-z]+(-[0-9]{2})?$", "ab", "ab-12")
        return chance.choice((B, *numbers, *texts, one_of("a", "b/c", 1, 2.5, None)))
    if kind in (Pair, Choice):
        return kind((inner(), inner()))
    if kind is Many:
        return Many(inner(), 1, chance.choice((2, 4)))
    if kind is Map:
        return Map(inner(), chance.choice(((), ("a", 'q"'))))
    names = chance.sample(("a", "b?", "é", 'q"?', "long name", "/?"), chance.randint(1, 5))
    return {name: inner() for name in names}


def changed(value: Any) -> Iterator[Any]:
    """Variants of ``value`` with one change each, in every place. Some still fit."""
    if isinstance(value, dict):
        yield {**value, "zz": 1}
        for key, inner in value.items():
            yield {name: other for name, other in value.items() if name != key}
            yield from ({**value, key: other} for other in changed(inner))
    elif isinstance(value, list):
        yield [*value, *(value or [[]])]
        yield value[1:]
        for index, inner in enumerate(value):
            yield from ([*value[:index], other, *value[index + 1 :]] for other in changed(inner))
    elif isinstance(value, str):
        yield from (7, value + "z", f'{value}\t"', None)
    else:
        yield from ("7", 0.25, -(10**6), 10**6, [value], {"a": value})
