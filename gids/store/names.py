"""Names of types, relations and tables, and the file names made from them. Knows no files.

A type or key may be any text. In a path, all characters but letters, digits, `_` and `-` are percent-encoded,
so that a name cannot leave the dataset's directory or collide with another name.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

from gids.errors import FormatError

Relation = tuple[str, str, str]

NODE = "_N"
RELATION: Relation = ("_N", "_E", "_N")
SPLITS = ("train", "val", "test")
HEAT_ROLES = {
    "reverse-pagerank": "heat_reverse_pagerank",
    "sampled": "heat_sampled",
    "out-degree": "out_degree",
}
"""Methods that compute heat, the best first, and their names in a manifest."""
MAX_NAME_BYTES = 120
MAX_ENCODED_BYTES = 200  # a file name may have 255, and suffixes follow

_SAFE = frozenset((string.ascii_letters + string.digits + "_-").encode())


def check_name(name: object, what: str) -> str:
    """Return ``name`` if it is a valid name of a type, relation or table key; else raise FormatError."""
    if not isinstance(name, str) or not name:
        raise FormatError(f"{what} must be a non-empty text, not {name!r}")
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        raise FormatError(f"{what} {name!r} is not valid Unicode text") from None
    if len(encoded) > MAX_NAME_BYTES or "\0" in name:
        raise FormatError(f"{what} {name[:40]!r} is too long or holds a NUL (at most {MAX_NAME_BYTES} bytes)")
    return name


def encode_path(*names: str) -> str:
    """One path component made from ``names``, such as `paper.feat` or `a%2Fb.feat`."""
    encoded = ".".join(
        "".join(chr(b) if b in _SAFE else f"%{b:02X}" for b in name.encode()) for name in names
    )
    if len(encoded) > MAX_ENCODED_BYTES:
        name = ".".join(names)
        raise FormatError(
            f"the file name of {name!r} would have {len(encoded)} bytes, at most {MAX_ENCODED_BYTES}"
        )
    return encoded


def table_name(type_: str | Relation, key: str) -> str:
    """`paper.feat`, or `src.rel.dst.key` for a table of edges."""
    return f"{type_}.{key}" if isinstance(type_, str) else ".".join((*type_, key))


def table_path(type_: str | Relation, key: str) -> str:
    """The path component of a table: `table_name`, encoded."""
    return encode_path(*((type_,) if isinstance(type_, str) else type_), key)


def shard_paths(folder: str, outside: Sequence[Path], count: int) -> tuple[str, ...]:
    """The paths in a manifest of a table's shards: one in each directory outside, or else `count` inside."""
    parents = list(map(str, outside)) or ["tables"] * count
    return tuple(f"{parent}/{folder}/shard-{i:02d}.bin" for i, parent in enumerate(parents))


def describe_type(type_: str | Relation) -> str:
    return repr(type_) if isinstance(type_, str) else repr(".".join(type_))
