"""What a command prints for a program, checked by its schema (manygpus/schemas)."""

import json

import jsonschema
from conftest import REPOSITORY

SCHEMAS = REPOSITORY / "manygpus" / "schemas"


def document(text: str, kind: str) -> dict:
    """Read one JSON document and nothing else; its schema has to describe every key."""
    schema = _closed(json.loads((SCHEMAS / f"{kind}.json").read_text()))
    jsonschema.Draft202012Validator.check_schema(schema)
    read = json.loads(text)
    jsonschema.validate(read, schema, jsonschema.Draft202012Validator)
    return read


def _closed(schema: object) -> object:
    """Return a schema that takes no key that it does not describe, as a later kit may write."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(part) for name, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and "required" in schema:
        closed["additionalProperties"] = False
    return closed
