"""Checks a value against the part of JSON Schema that docs/bench-schema.json uses."""

from __future__ import annotations

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}
_WORDS = {"type", "const", "enum", "minimum", "minItems", "items", "required", "properties"}
_WORDS |= {"additionalProperties", "description", "title", "$schema"}


def faults(value, schema, where="$"):
    """A line for every way in which value is not what schema asks for."""
    assert set(schema) <= _WORDS, f"{where}: this checker does not know {set(schema) - _WORDS}"
    found = []
    types = schema.get("type", [])
    if types and not any(_is(value, t) for t in ([types] if isinstance(types, str) else types)):
        return [f"{where} is {type(value).__name__}, not {types}"]
    if "const" in schema and value != schema["const"]:
        found.append(f"{where} is {value!r}, not {schema['const']!r}")
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{where} is {value!r}, none of {schema['enum']}")
    if "minimum" in schema and value < schema["minimum"]:
        found.append(f"{where} is {value}, less than {schema['minimum']}")
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            found.append(f"{where} has {len(value)} items")
        for number, item in enumerate(value):
            found += faults(item, schema.get("items", {}), f"{where}[{number}]")
    if isinstance(value, dict):
        found += [f"{where} lacks {key!r}" for key in schema.get("required", []) if key not in value]
        for key, item in value.items():
            more = schema.get("additionalProperties", {})
            rule = schema.get("properties", {}).get(key, more)
            if rule is False:
                found.append(f"{where} has {key!r}, which is not in the schema")
            else:
                found += faults(item, rule, f"{where}.{key}")
    return found


def _is(value, name):
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES[name])
