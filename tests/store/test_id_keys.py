"""Ids of nodes as they are stored: their keys, and how nodes are found. The model is a dictionary."""

import itertools

import numpy as np
import pytest
import torch

from gids.store.ids import NodeIds, number_keys, text_keys

MASK = (1 << 64) - 1


def mixed(x):
    """SplitMix64 for a state x."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def text_key(data):
    key = mixed(len(data))
    for first in range(0, len(data), 8):
        key = mixed(key ^ int.from_bytes(data[first : first + 8], "little"))
    return key


def offsets_of(texts):
    return np.concatenate([[0], np.cumsum([len(t) for t in texts], dtype=np.int64)]).astype(np.int64)


def keys_of(texts):
    return text_keys(np.frombuffer(b"".join(texts), np.uint8), offsets_of(texts))


def test_keys_are_those_of_the_format():
    assert number_keys(np.array([0])).view(np.uint64)[0] == 0xE220A8397B1DCDAF  # published for seed 0
    numbers = np.array([-1, 1 << 62, -(1 << 63), 5])
    assert number_keys(numbers).view(np.uint64).tolist() == [mixed(n & MASK) for n in numbers.tolist()]
    rng = np.random.default_rng(0)
    texts = [rng.bytes(n) for n in (*range(40), 0, 8, 16, 1024)] + [b"a\0", b"a", b""]
    assert keys_of(texts).view(np.uint64).tolist() == [text_key(t) for t in texts]
    assert keys_of([]).tolist() == []


def of_one_key(count):
    """Texts of 16 ASCII letters: the second half makes up for what the first half does to the key."""

    def after(half):
        return mixed(mixed(16) ^ int.from_bytes(half, "little"))

    texts, first, second = [b"aaaaaaaabbbbbbbb"], b"aaaaaaaa", int.from_bytes(b"bbbbbbbb", "little")
    for number in itertools.count():
        half = b"%08d" % number
        text = half + (second ^ after(first) ^ after(half)).to_bytes(8, "little")
        if text.isascii():
            texts.append(text)
        if len(texts) == count:
            return texts


def test_text_of_one_key_is_told_apart():
    *same, unknown = of_one_key(4)
    texts = [b"n0", *same, b"n1"]
    keys = keys_of(texts)
    assert len({*keys[1:4].tolist(), *keys_of([unknown]).tolist()}) == 1
    order = np.argsort(keys, kind="stable")
    arrays = {
        "id": np.frombuffer(b"".join(texts), np.uint8),
        "id_offset": offsets_of(texts),
        "id_key": keys[order],
        "id_node": order.astype(np.int32),
    }
    ids = NodeIds("a", len(texts), {role: lambda role=role: arrays[role] for role in arrays})
    assert ids.find([texts[node].decode() for node in (3, 1, 0, 2, 4, 1)]).tolist() == [3, 1, 0, 2, 4, 1]
    for absent in (unknown.decode(), "n2", ""):
        with pytest.raises(KeyError, match=r"no 'a' node has the id "):
            ids.find(["n0", absent])


def test_numbers_beyond_int64_are_no_ids():
    ids = np.array([-1, 7])
    keys = number_keys(ids)
    order = np.argsort(keys)
    arrays = {"id": ids, "id_key": keys[order], "id_node": order}
    stored_ids = NodeIds("a", 2, {role: lambda role=role: arrays[role] for role in arrays})
    assert stored_ids.find(torch.tensor([7, -1])).tolist() == [1, 0]
    with pytest.raises(KeyError, match=r"has the id 18446744073709551615$"):
        stored_ids.find(np.array([(1 << 64) - 1], np.uint64))
    with pytest.raises(TypeError, match="ids of 'a' nodes are whole numbers"):
        stored_ids.find(["7"])
