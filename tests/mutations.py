"""Changes of JSON data, as an accident or somebody hostile might make them."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, -(2**31), 10**18, 10**30, 0.5, -0.5, 1e308, 1e-308),
    *(math.inf, -math.inf, math.nan, "", "x", "0", "-1", "inf", "nan", "__class__", "../../etc", "\0", "é" * 99),
    *(2**24, 2**53, 10**400, "\x1b[2J", "\ud800", "\u202e", "a\nb", "x" * 10**5),
    *([], {}, [[]], [None], {"": None}, {"x": {"x": {}}}, [0] * 1000, "9" * 5000),
)


def mutated(data: Any, chance: random.Random, *, changes: int = 1, subtle: bool = False) -> Any:
    """A copy of JSON data with some changes at random places; subtle ones keep its form."""
    data = copy.deepcopy(data)
    for _ in range(changes):
        places = list(_places(data))
        if not places:
            break
        container, key = chance.choice(places)
        change = chance.choice(_SUBTLE if subtle else _ANY)
        change(container, key, places, chance)
    return data


def nested(depth: int) -> Any:
    """Lists in lists, as deep as that."""
    data: Any = 1
    for _ in range(depth):
        data = [data]
    return data


def damaged(text: bytes, chance: random.Random) -> bytes:
    """A file with flipped, lost, added and repeated bytes, or cut off."""
    data = bytearray(text)
    for _ in range(chance.choice((1, 1, 3, 20))):
        place, length = chance.randrange(len(data) + 1), chance.randrange(1, 30)
        match chance.randrange(6):
            case 0:
                del data[place:]
            case 1:
                del data[place : place + length]
            case 2:
                data[place:place] = chance.randbytes(length)
            case 3:
                data[place:place] = data[place : place + length]
            case _:
                data[place : place + 1] = bytes([chance.randrange(256)])
    return bytes(data)


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every entry of every list and object. Some lists are long: their first and last entries do for all."""
    keys: list[Any] = list(data) if isinstance(data, dict) else list(range(len(data)))
    for key in keys if len(keys) <= 8 else [*keys[:4], *keys[-4:]]:
        yield data, key
        if isinstance(data[key], (dict, list)):
            yield from _places(data[key])


Place = tuple[Any, Any]
Change = Callable[[Any, Any, list[Place], random.Random], None]


def _junk(container: Any, key: Any, places: list[Place], chance: random.Random) -> None:
    container[key] = copy.deepcopy(chance.choice(JUNK))


def _delete(container: Any, key: Any, places: list[Place], chance: random.Random) -> None:
    del container[key]


def _double(container: Any, key: Any, places: list[Place], chance: random.Random) -> None:
    if isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    else:
        container[f"{key}{chance.choice(['', ' ', '0', 'x'])}"] = copy.deepcopy(container[key])


def _nudge(container: Any, key: Any, places: list[Place], chance: random.Random) -> None:
    """A number a little off, or far; of anything else, another of its kind."""
    value = container[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _elsewhere(container, key, places, chance)
        return
    container[key] = chance.choice(
        (value + 1, value - 1, -value, value * 2, value * 10**12, value / 2 if abs(value) < 1e300 else 0, str(value))
    )


def _elsewhere(container: Any, key: Any, places: list[Place], chance: random.Random) -> None:
    """What stands at another place, if possible of the same kind."""
    kind = type(container[key])
    alike = [(c, k) for c, k in places if type(c[k]) is kind]
    other, where = chance.choice(alike if chance.random() < 0.8 else places)
    container[key] = copy.deepcopy(other[where])


def _sibling(container: Any, key: Any, places: list[Place], chance: random.Random) -> None:
    """What stands elsewhere under the same name, and looks alike."""
    form = _form(container[key])
    alike = [(c, k) for c, k in places if _form(c[k]) == form and (k == key or isinstance(c, list))]
    other, where = chance.choice(alike)
    container[key] = copy.deepcopy(other[where])


def _form(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(sorted(value)) if all(not key.isdecimal() for key in value) else "numbered"
    return (type(value), len(value) if isinstance(value, list) and len(value) < 8 else 0)


def _drop(container: Any, key: Any, places: list[Place], chance: random.Random) -> None:
    """An entry of a list or of a numbered object."""
    if isinstance(container, list) or str(key).isdecimal():
        del container[key]
    else:
        _sibling(container, key, places, chance)


def _empty(container: Any, key: Any, places: list[Place], chance: random.Random) -> None:
    if isinstance(container[key], (list, dict)):
        container[key] = type(container[key])()
    else:
        _sibling(container, key, places, chance)


def _rename(container: Any, key: Any, places: list[Place], chance: random.Random) -> None:
    if isinstance(container, dict):
        container[chance.choice(("", "x", "-1", "99999999", "1e3", str(key).upper(), f"{key}x"))] = container.pop(key)
    else:
        chance.shuffle(container)


def _nest(container: Any, key: Any, places: list[Place], chance: random.Random) -> None:
    container[key] = [container[key]] if chance.random() < 0.5 else {"x": container[key]}


_ANY = (_junk, _junk, _delete, _double, _nudge, _nudge, _elsewhere, _elsewhere, _rename, _nest)
_SUBTLE = (_sibling, _sibling, _nudge, _drop, _empty)
