"""Small schemas with every kind of group."""

from kvkeep.schema import Component, Group, Identity, Residence, Schema

P = 2  # tokens of a page
ABSENT, WRITING, LIVE = map(int, Residence)  # NumPy is slow with enums


def group(name: str, tail: int | None = None, required: bool = True, working: int = 0) -> Group:
    component = Component("k", (0,), (1,), "F32")
    return Group(name, (component,), tail=tail, required=required, working=working)


TWO = Schema(Identity("m"), P, (group("full"), group("draft")))
FOUR = Schema(
    Identity("m"),
    P,
    (group("full"), group("window", 2), group("state", 1), group("draft", required=False)),
)
FIVE = Schema(
    Identity("m"),
    P,
    (
        group("full"),
        group("window", 2),
        group("state", 1, working=1),
        group("draft", required=False),
        group("near draft", 3, required=False),
    ),
)
