"""A disk in memory that applies the calls of a log: what it holds now, and what a loss of power would leave.

The strictest reading of POSIX: data survives once its file was synced after the write, a name once its
directory was synced after it came or went. A rename between two directories survives in both or in neither.
Knows nothing of datasets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(eq=False)
class Node:
    """A file, or a directory (entries is not None)."""

    data: bytearray = field(default_factory=bytearray)
    entries: dict[str, Node] | None = None
    synced_data: bytes = b""
    synced_entries: dict[str, Node] = field(default_factory=dict)

    def sync(self) -> None:
        self.synced_data = bytes(self.data)
        self.synced_entries = dict(self.entries or {})


@dataclass(frozen=True)
class Call:
    """One line of the log; see calls.cpp."""

    name: str
    path: str
    second: str = ""
    data: bytes = b""

    @classmethod
    def parse(cls, line: str) -> Call:
        name, path, second, data = line.rstrip("\n").split("\t")
        return cls(name, path, second, bytes.fromhex(data))


class Disk:
    """What is below a directory; all of it has survived at the beginning.

    root: the directory, as calls name it. copy: where what is there at the beginning is read from.
    """

    def __init__(self, root: Path, copy: Path) -> None:
        self._root_path = str(root)
        self.root = _load(copy)
        self._renames: list[tuple[Node, Node]] = []  # pairs of directories, not synced yet

    def at(self, path: str) -> Node | None:
        """What is at an absolute path."""
        node: Node | None = self.root
        for name in self._names(path):
            node = None if node is None or node.entries is None else node.entries.get(name)
        return node

    def apply(self, call: Call) -> None:
        """Do what a call did. Raises NotImplementedError for one that is not simulated."""
        if call.name == "failed":
            return
        if call.name == "unknown":
            raise NotImplementedError(f"a call on {call.path} that is not simulated")
        if call.name == "rename":
            self._rename(call.path, call.second)
            return
        if call.name == "link":
            directory, name = self._parent(call.second)
            node = self.at(call.path)
            assert directory.entries is not None
            assert node is not None, call.path
            directory.entries[name] = node
            return
        if call.name in ("create", "mkdir", "unlink", "rmdir"):
            directory, name = self._parent(call.path)
            assert directory.entries is not None
            if call.name in ("unlink", "rmdir"):
                del directory.entries[name]
            else:
                directory.entries[name] = Node(entries={} if call.name == "mkdir" else None)
            return
        node = self.at(call.path)
        if node is None:  # a file that was removed while it is open
            return
        if call.name == "fsync":
            self._sync(node)
        elif call.name == "truncate":
            size = int(call.second)
            del node.data[size:]
            node.data.extend(bytes(size - len(node.data)))
        elif call.name == "write":
            first, last = int(call.second), int(call.second) + len(call.data)
            node.data.extend(bytes(max(0, first - len(node.data))))
            node.data[first:last] = call.data
        else:
            raise NotImplementedError(call.name)

    def write_survivors(self, root: Path, *, names: bool) -> None:
        """Make in an empty directory what a loss of power leaves.

        names: every name survives, and of data that was not synced there are zeros; else nothing survives
        that was not synced.
        """
        _write(self.root, root, names)

    def contents(self) -> dict[str, bytes]:
        """The data of every file, by its path below the root."""
        return dict(_contents(self.root, ""))

    def _rename(self, source: str, target: str) -> None:
        from_, name = self._parent(source)
        to, new = self._parent(target)
        assert from_.entries is not None
        assert to.entries is not None
        to.entries[new] = from_.entries.pop(name)
        self._renames.append((from_, to))

    def _sync(self, node: Node) -> None:
        todo, done = [node], set()
        while todo:
            one = todo.pop()
            if id(one) not in done:
                done.add(id(one))
                one.sync()
                todo += [b for pair in self._renames for a, b in (pair, pair[::-1]) if a is one]
        self._renames = [(a, b) for a, b in self._renames if id(a) not in done]

    def _names(self, path: str) -> list[str]:
        assert path == self._root_path or path.startswith(self._root_path + "/"), path
        return [name for name in path[len(self._root_path) :].split("/") if name]

    def _parent(self, path: str) -> tuple[Node, str]:
        directory, _, name = path.rpartition("/")
        found = self.at(directory)
        assert found is not None, directory
        return found, name


def _load(path: Path) -> Node:
    if path.is_dir():
        node = Node(entries={child.name: _load(child) for child in path.iterdir()})
    else:
        node = Node(data=bytearray(path.read_bytes()))
    node.sync()
    return node


def _write(node: Node, path: Path, names: bool) -> None:
    if node.entries is None:
        data = node.synced_data
        if names:
            data = data[: len(node.data)] + bytes(max(0, len(node.data) - len(data)))
        path.write_bytes(data)
        return
    path.mkdir(exist_ok=True)
    for name, child in (node.entries if names else node.synced_entries).items():
        _write(child, path / name, names)


def _contents(node: Node, path: str) -> Iterator[tuple[str, bytes]]:
    if node.entries is None:
        yield path, bytes(node.data)
    for name, child in (node.entries or {}).items():
        yield from _contents(child, f"{path}/{name}".lstrip("/"))
