"""Prompts of the format checks: what is asked, with which tools, and an answer that is right.

The prompts are our own; the method is that of OpenAI's compatibility test of gpt-oss providers
(https://cookbook.openai.com/articles/gpt-oss/verifying-implementations). Samples are what the
scripted stand-in answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from vllm_mlx_harmony.verify.values import Document, Tool

Kind: TypeAlias = str | list[str] | Document


def schema(**properties: Kind) -> Document:
    """A closed object whose properties are all required: types by name, enums as lists."""
    return {
        "type": "object",
        "properties": {name: _typed(kind) for name, kind in properties.items()},
        "required": list(properties),
        "additionalProperties": False,
    }


def _typed(kind: Kind) -> Document:
    if isinstance(kind, dict):
        return kind
    return {"type": kind} if isinstance(kind, str) else {"type": "string", "enum": kind}


def array(kind: Kind, **bounds: int) -> Document:
    return {"type": "array", "items": _typed(kind), **bounds}


MAYBE: Document = {"type": ["string", "null"]}

TOOLS = {
    tool.name: tool
    for tool in (
        Tool("get_weather", "The weather in a city, now.", schema(city="string")),
        Tool("get_forecast", "The weather in a city for some days.", schema(city="string", days="integer", unit=["celsius", "fahrenheit"])),
        Tool("get_stock_price", "The price of a stock.", schema(symbol="string")),
        Tool("convert_currency", "Converts an amount of money at today's rate. Currencies are ISO 4217 codes.", schema(amount="number", source="string", target="string")),
        Tool("send_email", "Sends an e-mail.", schema(to=array("string"), subject="string", body="string")),
        Tool("create_event", "Adds an event to the user's calendar. Times are ISO 8601.", schema(title="string", start="string", minutes="integer", place=MAYBE)),
        Tool("search_files", "Files whose text has a pattern.", schema(pattern="string", path=MAYBE)),
        Tool("read_file", "The text of a file.", schema(path="string")),
        Tool("run_command", "Runs a shell command.", schema(command=array("string"))),
        Tool("query_database", "Runs an SQL query that only reads.", schema(sql="string")),
        Tool("find_customer", "The id of a customer, by name.", schema(name="string")),
        Tool("list_orders", "The orders of a customer, by id.", schema(customer_id="integer")),
        Tool("set_light", "Sets a lamp.", schema(room="string", on="boolean", colour=["white", "red", "blue"])),
        Tool("translate", "Translates a text.", schema(text="string", language="string")),
        Tool("book_table", "Books a table in a restaurant.", schema(restaurant="string", people="integer", time="string")),
        Tool("order_pizza", "Orders pizzas.", schema(pizzas=array(schema(name="string", size=["small", "large"], count="integer")), address="string")),
        Tool("get_time", "The time in a city, now.", schema(city="string")),
        Tool("ready", "Tells the user that you are ready.", schema()),
    )
}  # fmt: skip

Called: TypeAlias = tuple[str, Document]


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt with tools. ``calls`` are right calls with arguments, in an order that is right,
    and ``results`` what they return; ``must`` are words that have to be in the arguments, or,
    without calls, in the answer. ``answer`` is the sample's last text.
    """

    name: str
    prompt: str
    tools: str
    calls: tuple[Called, ...] = ()
    must: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    answer: str = "Done."


WEATHER = "get_weather get_forecast get_time"
OFFICE = "send_email create_event search_files get_time"
CODE = "search_files read_file run_command query_database"
HOME = "set_light get_weather order_pizza book_table"
MONEY = "get_stock_price convert_currency find_customer list_orders"

ONE_CALL: tuple[tuple[str, str, str, str, Document, str], ...] = (
    ("weather", "How is the weather in Paris right now?", WEATHER, "get_weather", {"city": "Paris"}, "paris"),
    ("forecast", "Give me the forecast for Oslo for the next three days, in celsius.", WEATHER, "get_forecast", {"city": "Oslo", "days": 3, "unit": "celsius"}, "oslo 3 celsius"),
    ("time", "What time is it in Nairobi?", WEATHER, "get_time", {"city": "Nairobi"}, "nairobi"),
    ("no-greeting", "tokyo weather now", WEATHER, "get_weather", {"city": "Tokyo"}, "tokyo"),
    ("accents", "¿Qué tiempo hace ahora en São Paulo?", WEATHER, "get_weather", {"city": "São Paulo"}, "paulo"),
    ("fahrenheit", "I need a 5 day forecast for Boston, in fahrenheit please.", WEATHER, "get_forecast", {"city": "Boston", "days": 5, "unit": "fahrenheit"}, "boston 5 fahrenheit"),
    ("stock", "What does a share of Apple (AAPL) cost at the moment?", MONEY, "get_stock_price", {"symbol": "AAPL"}, "aapl"),
    ("currency", "How many Japanese yen (JPY) are 250 euros (EUR) today?", MONEY, "convert_currency", {"amount": 250, "source": "EUR", "target": "JPY"}, "250 eur jpy"),
    ("decimals", "Convert 19.99 USD to GBP at today's rate.", MONEY, "convert_currency", {"amount": 19.99, "source": "USD", "target": "GBP"}, "19.99 usd gbp"),
    ("customer", "Look up the id of our customer Grace Hopper.", MONEY, "find_customer", {"name": "Grace Hopper"}, "hopper"),
    ("orders", "List all orders of the customer with the id 40417.", MONEY, "list_orders", {"customer_id": 40417}, "40417"),
    ("email", "Send an e-mail to ada@example.com and bob@example.com with the subject Lunch and the text: Lunch is at noon.", OFFICE, "send_email", {"to": ["ada@example.com", "bob@example.com"], "subject": "Lunch", "body": "Lunch is at noon."}, "ada@example.com bob@example.com lunch noon"),
    ("event", "Put a 45 minute event called Review on my calendar, on 4 March 2027 at 14:00, without a place.", OFFICE, "create_event", {"title": "Review", "start": "2027-03-04T14:00:00", "minutes": 45, "place": None}, "review 2027-03-04 45"),
    ("place", "Add Dentist to my calendar: 2 May 2027, 9:30, half an hour, at Main Street 5.", OFFICE, "create_event", {"title": "Dentist", "start": "2027-05-02T09:30:00", "minutes": 30, "place": "Main Street 5"}, "dentist 2027-05-02 30 street"),
    ("search", "Which files mention the word deprecated?", CODE, "search_files", {"pattern": "deprecated", "path": None}, "deprecated"),
    ("read", "Show me what is in src/app/main.py.", CODE, "read_file", {"path": "src/app/main.py"}, "src/app/main.py"),
    ("command", "Run `git status --short` for me.", CODE, "run_command", {"command": ["git", "status", "--short"]}, "git status --short"),
    ("sql", "Query the database: how many rows has the table invoices?", CODE, "query_database", {"sql": "SELECT COUNT(*) FROM invoices"}, "select count invoices"),
    ("light", "Switch the lamp in the kitchen on, in blue.", HOME, "set_light", {"room": "kitchen", "on": True, "colour": "blue"}, "kitchen true blue"),
    ("table", "Book a table for six at Luigi's tonight at 20:00.", HOME, "book_table", {"restaurant": "Luigi's", "people": 6, "time": "20:00"}, "luigi 6"),
    ("nested", "Order two large Margherita and one small Funghi to 12 Elm Road.", HOME, "order_pizza", {"pizzas": [{"name": "Margherita", "size": "large", "count": 2}, {"name": "Funghi", "size": "small", "count": 1}], "address": "12 Elm Road"}, "margherita large 2 funghi small 1 elm"),
    ("translate", "Use the translate tool: put \"good night\" into Finnish.", "translate get_time", "translate", {"text": "good night", "language": "Finnish"}, "good finnish"),
)  # fmt: skip
"""Name, prompt, tools, the tool to be called, right arguments, words that must be in them."""

NO_CALL: tuple[tuple[str, str, str, str, str], ...] = (
    ("greeting", "Good morning! How are you today?", WEATHER, "Good morning!", ""),
    ("arithmetic", "What is 12 times 12?", WEATHER, "144.", "144"),
    ("knowledge", "What is the capital of Portugal?", MONEY, "Lisbon.", "lisbon"),
    ("poem", "Write two lines of verse about rain.", WEATHER, "Rain, rain,\non the pane.", ""),
    ("explain", "Explain in one sentence what an SQL index is.", CODE, "A sorted copy of a column.", ""),
    ("tools", "Which tools do you have? Only name them.", HOME, "set_light, get_weather, order_pizza and book_table.", "set_light"),
    ("rewrite", "Rewrite this politely: send me the file now", OFFICE, "Could you please send me the file?", "file"),
    ("thanks", "Thanks, that is all for today.", OFFICE, "You are welcome.", ""),
)  # fmt: skip
"""Name, prompt, tools, a right answer, a word that must be in it."""

SEVERAL = (
    Case(
        "sequential",
        "What are the orders of our customer Ada Byron? First find her id.",
        MONEY,
        (("find_customer", {"name": "Ada Byron"}), ("list_orders", {"customer_id": 77310})),
        ("byron", "77310"),
        ('{"id":77310}', '{"orders":["typewriter, order 901"]}'),
        "Ada Byron ordered a typewriter (901).",
    ),
    Case(
        "parallel",
        "Compare the weather now in Rome and in Cairo. Which city is warmer?",
        WEATHER,
        (("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Cairo"})),
        ("rome", "cairo"),
        ("Rome: 16 °C", "Cairo: 29 °C"),
        "Cairo is warmer: 29 °C, and 16 °C in Rome.",
    ),
    Case(
        "three-steps",
        "Find the file that defines parse_date, read it, and then run its tests with pytest.",
        CODE,
        (
            ("search_files", {"pattern": "parse_date", "path": None}),
            ("read_file", {"path": "lib/dates.py"}),
            ("run_command", {"command": ["pytest"]}),
        ),
        ("parse_date", "lib/dates.py", "pytest"),
        ("lib/dates.py:4: def parse_date(text)", "def parse_date(text): ...", "3 passed"),
        "The 3 tests pass.",
    ),
    Case(
        "error",
        "How much are 80 CHF in SEK? If a tool fails, try it once more.",
        MONEY,
        (("convert_currency", {"amount": 80, "source": "CHF", "target": "SEK"}),) * 2,
        ("chf", "sek"),
        ("error: timeout, try again", "941.60 SEK"),
        "80 CHF are 941.60 SEK.",
    ),
)

PERSON = schema(name="string", email=MAYBE, age="integer")
TREE: Document = {
    "type": "object",
    "properties": {
        "value": {"type": "string"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
    },
    "required": ["value", "children"],
    "additionalProperties": False,
}

SCHEMAS: tuple[tuple[str, str, Document, Document], ...] = (
    ("person", "Ada, 36, ada@example.com", PERSON, {"name": "Ada", "email": "ada@example.com", "age": 36}),
    ("null", "Bob is 50 and has no e-mail address.", PERSON, {"name": "Bob", "email": None, "age": 50}),
    ("sentiment", "I love this phone, but the battery is weak.", schema(sentiment=["positive", "negative", "mixed"], score="number"), {"sentiment": "mixed", "score": 0.4}),
    ("list", "Buy milk, eggs and bread.", schema(items=array("string")), {"items": ["milk", "eggs", "bread"]}),
    ("bounded", "Name exactly three primary colours.", schema(colours=array("string", minItems=3, maxItems=3)), {"colours": ["red", "yellow", "blue"]}),
    ("numbers", "The box is 30 by 20.5 by 10 cm and weighs 2 kg.", schema(size=array("number"), weight="number"), {"size": [30, 20.5, 10], "weight": 2}),
    ("boolean", "Is 17 a prime number?", schema(answer="boolean", reason="string"), {"answer": True, "reason": "No divisor."}),
    ("nested", "Alan, 41, lives at 5 High Street, Leeds.", schema(person=schema(name="string", age="integer"), address=schema(street="string", city="string")), {"person": {"name": "Alan", "age": 41}, "address": {"street": "5 High Street", "city": "Leeds"}}),
    ("invoice", "Invoice 17: 2 lamps at 30 EUR, 1 desk at 200 EUR.", schema(number="integer", currency=["EUR", "USD"], lines=array(schema(item="string", count="integer", price="number"))), {"number": 17, "currency": "EUR", "lines": [{"item": "lamp", "count": 2, "price": 30}, {"item": "desk", "count": 1, "price": 200}]}),
    ("union", "The value is the number 7.", schema(value={"anyOf": [{"type": "integer"}, {"type": "string"}]}), {"value": 7}),
    ("variants", "A circle with radius 2 and a square with side 3.", schema(shapes=array({"anyOf": [schema(kind=["circle"], radius="number"), schema(kind=["square"], side="number")]})), {"shapes": [{"kind": "circle", "radius": 2}, {"kind": "square", "side": 3}]}),
    ("recursive", "A tree: root a with the children b and c.", {**TREE, "$defs": {"node": TREE}}, {"value": "a", "children": [{"value": "b", "children": []}, {"value": "c", "children": []}]}),
    ("reference", "From Rome (41.9, 12.5) to Oslo (59.9, 10.8).", {**schema(start={"$ref": "#/$defs/p"}, end={"$ref": "#/$defs/p"}), "$defs": {"p": schema(lat="number", lon="number")}}, {"start": {"lat": 41.9, "lon": 12.5}, "end": {"lat": 59.9, "lon": 10.8}}),
    ("steps", "Solve 8x + 7 = -23 step by step.", schema(steps=array(schema(explanation="string", output="string")), final_answer="string"), {"steps": [{"explanation": "Subtract 7.", "output": "8x = -30"}], "final_answer": "x = -3.75"}),
    ("entities", "Marie Curie worked in Paris.", schema(people=array("string"), places=array("string"), dates=array("string")), {"people": ["Marie Curie"], "places": ["Paris"], "dates": []}),
    ("matrix", "The identity matrix of size 2.", schema(rows=array(array("integer"))), {"rows": [[1, 0], [0, 1]]}),
    ("unicode", "Translate thank you into Japanese and French.", schema(日本語="string", français="string"), {"日本語": "ありがとう", "français": "merci"}),
    ("escapes", "Quote this line exactly: say \"hi\"\\n", schema(line="string"), {"line": 'say "hi"\\n'}),
    ("range", "Rate this review from 1 to 5: it was all right.", schema(stars={"type": "integer", "minimum": 1, "maximum": 5}), {"stars": 3}),
    ("pattern", "The flight LH 400 leaves on 3 May 2027.", schema(flight={"type": "string", "pattern": "^[A-Z]{2}[0-9]{1,4}$"}, date={"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}), {"flight": "LH400", "date": "2027-05-03"}),
)  # fmt: skip
"""Name, text, schema, and a document that is valid."""

CASES = (
    *(
        Case(f"call-{name}", prompt, tools, ((tool, arguments),), tuple(must.split()))
        for name, prompt, tools, tool, arguments, must in ONE_CALL
    ),
    *(
        Case(f"no-call-{name}", prompt, tools, must=(must,), answer=answer)
        for name, prompt, tools, answer, must in NO_CALL
    ),
)
