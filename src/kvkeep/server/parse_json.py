"""A program: parse JSON from stdin, and write the value, or what is wrong, to stdout with marshal.

:mod:`.large` runs it in a process of its own. It imports nothing of kvkeep: it starts in 50 ms.
Its argument is how many values there may be.
"""

import gc
import json
import marshal
import re
import resource
import sys
from typing import Any

STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""A string, also one without an end. It is linear: nothing is tried twice."""

MEMORY = 8 << 30  # bytes of address space


def parsed(raw: bytes, most: int) -> tuple[Any, ...]:
    """``("value", VALUE)``, or ``("syntax", MESSAGE, POSITION)``, ``("many",)``, ``("other",)``."""
    if STRING.sub(b"", raw).count(b",") >= most:  # each stands between two: no need to parse them
        return ("many",)
    try:
        value = json.loads(raw)
        return ("value", value) if count(value, most) <= most else ("many",)
    except json.JSONDecodeError as error:
        return ("syntax", error.msg, error.pos)
    except MemoryError:
        return ("many",)
    except (ValueError, RecursionError):  # no UTF-8, a number of too many digits, too deep
        return ("other",)


def count(value: object, most: int) -> int:
    """How many values ``value`` has; a number above ``most`` if that is exceeded."""
    found, here = 1, [value]
    while here and found <= most:
        deeper: list[object] = []
        for outer in here:
            if isinstance(outer, dict | list):
                found += len(outer)
                deeper += outer.values() if isinstance(outer, dict) else outer
        here = deeper
    return found


if __name__ == "__main__":
    gc.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    marshal.dump(parsed(sys.stdin.buffer.read(), int(sys.argv[1])), sys.stdout.buffer)
