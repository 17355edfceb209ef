"""The words and the sizes of numbers that the kinds of problem are written with.

It holds names, things and places, and the draws that the kinds share. It knows no kind of problem
and no file. Draws go through `random.Random.random` alone, whose stream Python keeps stable from
version to version.
"""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Person(NamedTuple):
    """A name with its pronouns: `Mia`, `she`, `her`."""

    name: str
    they: str
    their: str

    @property
    def They(self) -> str:  # noqa: N802
        """The pronoun at the head of a sentence."""
        return self.they.capitalize()


class Draft(NamedTuple):
    """A problem as a kind draws it.

    numbers: every number drawn, in a fixed order; with the kind's name they decide the side of the
    split. question: the text asked. steps: the sentences of the answer. answer: the number after
    `####`. short: the same answer with steps taken together, harder to get right; None when there
    is no such way.
    """

    numbers: tuple[int, ...]
    question: str
    steps: tuple[str, ...]
    answer: int
    short: tuple[str, ...] | None = None


def _words(text: str, between: str | None = None) -> tuple[str, ...]:
    return tuple(text.split(between))


SHE = _words(
    "Ada Aisha Alice Amara Anna Bella Chloe Clara Daisy Elena Ella Emma Eva Fatima Grace Hana Ines"
    " Iris Jane Julia Kate Keiko Lena Lily Lucy Maria Maya Mei Mia Nadia Nina Nora Olga Priya Rosa"
    " Ruth Sara Sofia Tara Zoe"
)
HE = _words(
    "Adam Ahmed Alex Ben Carlos Chen Daniel David Diego Eli Emil Felix Finn George Hugo Ivan Jack"
    " James Jonas Kai Karim Leo Liam Luca Marco Max Mateo Noah Oliver Omar Oscar Paul Peter Rafael"
    " Ravi Sam Samir Theo Tom Yusuf"
)
PEOPLE = tuple(Person(n, "she", "her") for n in SHE) + tuple(Person(n, "he", "his") for n in HE)

KEEPSAKES = _words(
    "marbles stickers cards shells stamps coins beads buttons badges postcards pebbles magnets"
    " posters ribbons puzzles stars tokens photos feathers crystals"
)
FRUIT = _words(
    "apples pears plums oranges lemons peaches cherries figs mangoes kiwis apricots limes"
)
BAKED = _words(
    "cookies muffins rolls pies cakes tarts scones buns waffles pretzels bagels brownies"
)
GOODS = _words(
    "pens books shirts hats mugs lamps toys balls scarves bags cups plates candles vases bowls"
    " towels socks games brushes clocks kites belts gloves frames"
)
PACKS = _words("boxes bags crates packs baskets cartons trays jars chests bins")
BOXES = _words("boxes bags packs baskets cartons tins")
MADE = (
    ("loom", "scarves"),
    ("loom", "blankets"),
    ("printer", "posters"),
    ("printer", "postcards"),
    ("robot", "toys"),
    ("robot", "clocks"),
    ("press", "badges"),
    ("press", "coins"),
    ("kiln", "mugs"),
    ("kiln", "plates"),
    ("machine", "buttons"),
    ("machine", "pencils"),
)
SHOPS = _words("shop|market stall|kiosk|store|bakery|stand|museum shop|corner shop", "|")
CROPS = (
    ("apple trees", "apples"),
    ("pear trees", "pears"),
    ("plum trees", "plums"),
    ("fig trees", "figs"),
    ("lemon trees", "lemons"),
    ("vines", "grapes"),
    ("rose bushes", "roses"),
    ("pepper plants", "peppers"),
    ("tomato plants", "tomatoes"),
    ("melon plants", "melons"),
    ("sunflowers", "seeds"),
    ("bean plants", "beans"),
)
PLACES = _words(
    "the lake|the coast|the city|the mountains|the village|the forest|the farm|the airport", "|"
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January March April May June July August September October November")
EVENTS = _words("concert play fair match parade show dance film circus festival")


def pick(rng: Random, choices: Sequence[T]) -> T:
    """One of `choices`, each as likely."""
    return choices[int(rng.random() * len(choices))]


def pair(rng: Random, choices: Sequence[T]) -> tuple[T, T]:
    """Two different entries of `choices`."""
    first = int(rng.random() * len(choices))
    second = (first + 1 + int(rng.random() * (len(choices) - 1))) % len(choices)
    return choices[first], choices[second]


def between(rng: Random, low: int, high: int) -> int:
    """A whole number from `low` to `high`, both ends included."""
    return low + int(rng.random() * (high - low + 1))


def few(rng: Random) -> int:
    """A number as of friends, days or boxes: 3 to 19, at times 12 to 79."""
    return between(rng, 3, 19) if rng.random() < 0.6 else between(rng, 12, 79)


def some(rng: Random) -> int:
    """A number as of a price or a bag's content: 12 to 98, as often 105 to 795."""
    return between(rng, 12, 98) if rng.random() < 0.5 else between(rng, 105, 795)


def many(rng: Random) -> int:
    """A number as of a collection or a harvest: 105 to 985, at times 1,050 to 9,850."""
    return between(rng, 105, 985) if rng.random() < 0.6 else between(rng, 1050, 9850)
