"""Function declarations in the TypeScript-like form that the harmony format shows to its models.

Written after the publisher's description and samples, and compared with what its library makes of many schemas; its
oddities are kept (only a function's own description has each of its lines marked; nested types are indented, their
first line is not), because the model was trained on them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dayzero.chat.conversation import Tool


def declarations(tools: Sequence[Tool]) -> str:
    """The ``functions`` namespace."""
    return "namespace functions {\n\n" + "".join(_function(tool) for tool in tools) + "} // namespace functions"


def _function(tool: Tool) -> str:
    head = "".join(f"// {line}\n" for line in (tool.description or "").split("\n") if tool.description)
    schema = tool.parameters
    if not schema:
        return f"{head}type {tool.name} = () => any;\n\n"
    return f"{head}type {tool.name} = (_: {_type(schema, '')}) => any;\n\n"


def _comment(text: Any, indent: str) -> str:
    if not isinstance(text, str) or not text:
        return ""
    return f"{indent}// {text}\n"


def _type(schema: Any, indent: str) -> str:
    if not isinstance(schema, Mapping):
        return "any"
    variants = schema.get("oneOf")
    if isinstance(variants, list) and variants:
        return "".join(f"\n{indent} | {_variant(v, indent)}" for v in variants)
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(_NAMES.get(k, str(k)) for k in kind) or "any"
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        items = schema.get("items")
        return f"{_type(items, indent)}[]" if isinstance(items, Mapping) else "Array<any>"
    values = schema.get("enum")
    if kind == "string" and isinstance(values, list) and values:
        return " | ".join(json.dumps(v, ensure_ascii=False) for v in values)
    return _NAMES.get(kind, "any") if isinstance(kind, str) else "any"


_NAMES = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null"}


def _object(schema: Mapping[str, Any], indent: str) -> str:
    out = _comment(schema.get("description"), indent) + "{\n"
    properties = schema.get("properties")
    required = schema.get("required") or ()
    for key, said in properties.items() if isinstance(properties, Mapping) else ():
        out += _property(key, said if isinstance(said, Mapping) else {}, key in required, indent)
    return out + indent + "}"


def _property(key: str, said: Mapping[str, Any], required: bool, indent: str) -> str:
    mark = "" if required else "?"
    title = said.get("title")
    out = f"{indent}// {title}\n{indent}//\n" if isinstance(title, str) else ""
    variants = said.get("oneOf")
    one_of = isinstance(variants, list) and bool(variants)
    first = variants[0] if one_of and isinstance(variants, list) else None
    repeated = isinstance(first, Mapping) and first.get("description") == said.get("description")
    if not (one_of and repeated):
        out += _comment(said.get("description"), indent)
    examples = said.get("examples")
    if isinstance(examples, list) and examples:
        out += f"{indent}// Examples:\n"
        out += "".join(f"{indent}// - {json.dumps(e, ensure_ascii=False)}\n" for e in examples if isinstance(e, str))
    if one_of:
        out += f"{indent}// default: {_default(said)}\n" if "default" in said else ""
        return out + f"{indent}{key}{mark}:{_type(said, indent)}\n{indent},\n"
    behind = f" // default: {_default(said)}" if "default" in said else ""
    return out + f"{indent}{key}{mark}: {_nullable(said, indent + '    ')},{behind}\n"


def _variant(said: Any, indent: str) -> str:
    if not isinstance(said, Mapping):
        return "any"
    comments = [said["description"]] if isinstance(said.get("description"), str) else []
    comments += [f"default: {_default(said)}"] if "default" in said else []
    return _nullable(said, indent + "   ") + (f" // {' '.join(comments)}" if comments else "")


def _nullable(said: Mapping[str, Any], indent: str) -> str:
    text = _type(said, indent)
    return f"{text} | null" if said.get("nullable") is True and "null" not in text else text


def _default(said: Mapping[str, Any]) -> str:
    """A default as it is shown: text in quotes, except that of an enumeration."""
    value = said["default"]
    if isinstance(value, str) and said.get("enum"):
        return value
    return json.dumps(value, ensure_ascii=False)
