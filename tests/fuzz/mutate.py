"""Bad input by chance: values that no field expects, trees changed in one place, bytes damaged."""

import copy
import json
import random
from typing import Any

WORDS = (
    "", " ", ".", "..", "../x", "a/../../b", "-1", "0", "1e9", "nan", "Infinity", "null", "$(id)", "; true", "`id`",
    "\0", "a\nb", "\u202e", "naïve", "cpu", "auto", "h100", "h200", "qwen2.5-7b", "tiny-llama", "2048", "2k", "9" * 40,
    "x" * 5000, "%s%n", "{0}", "__class__", "!!python/object", "\ud800",
    "~nobody-here/x", "/" + "y" * 5000, "a/\0",
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 7, 2**31, 2**63, 10**30, -(10**30), 0.5, -0.0, 1e308, 1e-308, float("nan"), float("inf"))


def value(dice: random.Random, depth: int = 3) -> Any:
    """Some value, most likely not the one that is expected."""
    kind = dice.randrange(8)
    if kind < 3:
        return dice.choice(WORDS)
    if kind < 5:
        return dice.choice(NUMBERS)
    if kind < 6 or not depth:
        return dice.choice((None, True, False, [], {}))
    if kind < 7:
        return [value(dice, depth - 1) for _ in range(dice.randrange(4))]
    return {dice.choice(WORDS): value(dice, depth - 1) for _ in range(dice.randrange(4))}


def tree(dice: random.Random, data: Any, changes: int = 3) -> Any:
    """`data` changed in a few places: values replaced, taken away, doubled, or added."""
    changed = copy.deepcopy(data)
    for _ in range(dice.randint(1, changes)):
        _change(dice, changed)
    return changed


def _change(dice: random.Random, here: Any) -> None:
    while isinstance(here, dict | list) and here:
        key = dice.choice(list(here)) if isinstance(here, dict) else dice.randrange(len(here))
        if isinstance(here[key], dict | list) and here[key] and dice.random() < 0.8:
            here = here[key]
            continue
        how = dice.randrange(6)
        if how == 0:
            del here[key]
        elif how == 1 and isinstance(here, dict):
            here[dice.choice(WORDS)] = value(dice)
        elif how == 2 and isinstance(here, list):
            here.append(here[key])
        elif how == 3 and isinstance(here[key], int | float):
            here[key] = here[key] * dice.choice((-1, 2, 1000, 1e12)) if dice.random() < 0.9 else str(here[key])
        else:
            here[key] = value(dice)
        return


def damaged(dice: random.Random, content: bytes) -> bytes:
    """`content` cut, flipped, doubled or with something in its middle."""
    data = bytearray(content)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(data) + 1)
        how = dice.randrange(5)
        if how == 0:
            del data[at:]
        elif how == 1 and at < len(data):
            data[at] ^= 1 << dice.randrange(8)
        elif how == 2:
            data[at:at] = dice.randbytes(dice.randrange(40))
        elif how == 3:
            data[at:at] = data[at : at + dice.randrange(2000)]
        else:
            data[at:at] = dice.choice((b"[" * 3000, b'{"a":' * 3000, b"\xff\xfe", b"NaN", b"1e999", b"\0" * 600))
    return bytes(data)


def text(data: Any) -> bytes:
    """`data` as JSON that may hold what JSON should not: NaN, lone surrogates."""
    return json.dumps(data).encode("utf-8", "surrogatepass")
