"""Kinds of problem about counting, sharing and packing things.

Each function draws the numbers and the words of one problem; its name is the kind's name. Every
step is a sentence with an equation, `a + b = c`, over whole numbers; `short` joins steps in one
equation. Knows nothing of the split, of files or of tokens.
"""

from random import Random

from words import (
    BAKED,
    BOXES,
    CROPS,
    DAYS,
    EVENTS,
    FRUIT,
    KEEPSAKES,
    MADE,
    PACKS,
    PEOPLE,
    Draft,
    between,
    few,
    many,
    pair,
    pick,
    some,
)


def how_many_more(rng: Random) -> Draft:
    """One step: the difference of two collections."""
    (p, q), thing = pair(rng, PEOPLE), pick(rng, KEEPSAKES)
    b, d = many(rng), many(rng)
    a = b + d
    asked = pick(
        rng,
        (
            (
                f"{p.name} has {a} {thing} and {q.name} has {b}. How many more {thing} does"
                f" {p.name} have?"
            ),
            (
                f"{p.name} has {a} {thing}. {q.name} has {b} {thing}. How many {thing} does"
                f" {q.name} need to have as many?"
            ),
        ),
    )
    return Draft((a, b), asked, (f"The difference is {a} - {b} = {d} {thing}.",), d)


def more_and_total(rng: Random) -> Draft:
    """Two steps: one has more than the other; both together."""
    (p, q), thing = pair(rng, PEOPLE), pick(rng, KEEPSAKES)
    a, b = many(rng), many(rng)
    c = a + b
    asked = pick(
        rng,
        (
            (
                f"{p.name} has {a} {thing}. {q.name} has {b} more {thing} than {p.name}. "
                f"How many {thing} do they have together?"
            ),
            (
                f"{q.name} has {b} more {thing} than {p.name}, who has {a}. How many {thing} do the"
                " two have in all?"
            ),
        ),
    )
    steps = (
        f"{q.name} has {a} + {b} = {c} {thing}.",
        f"Together they have {a} + {c} = {a + c} {thing}.",
    )
    short = (f"Together they have {a} + {a} + {b} = {a + c} {thing}.",)
    return Draft((a, b), asked, steps, a + c, short)


def times_as_many(rng: Random) -> Draft:
    """Three steps: a multiple, a difference, a sum."""
    (p, q), thing = pair(rng, PEOPLE), pick(rng, KEEPSAKES)
    r = pick(rng, PEOPLE)
    while r in (p, q):
        r = pick(rng, PEOPLE)
    a, k = some(rng), between(rng, 3, 9)
    b = a * k
    m = between(rng, 5, b - 5)
    c = b - m
    asked = (
        f"{p.name} {pick(rng, ('has', 'collected', 'found'))} {a} {thing}. {q.name} has {k} times"
        f" as many. {r.name} has {m} fewer than {q.name}. How many {thing} do {q.name} and {r.name}"
        " have together?"
    )
    steps = (
        f"{q.name} has {a} * {k} = {b} {thing}.",
        f"{r.name} has {b} - {m} = {c} {thing}.",
        f"{q.name} and {r.name} have {b} + {c} = {b + c} {thing}.",
    )
    return Draft((a, k, m), asked, steps, b + c)


def packs_left(rng: Random) -> Draft:
    """Two steps: a product, then some are given away."""
    p, thing, packs = pick(rng, PEOPLE), pick(rng, KEEPSAKES), pick(rng, PACKS)
    n, m = some(rng), some(rng)
    whole = n * m
    g = between(rng, 11, whole - 11)
    asked = pick(
        rng,
        (
            (
                f"{p.name} has {n} {packs} with {m} {thing} in each. {p.They} gives away {g}"
                f" {thing}. How many are left?"
            ),
            (
                f"There are {m} {thing} in each of {p.name}'s {n} {packs}. How many {thing} does"
                f" {p.they} have after giving {g} to a friend?"
            ),
        ),
    )
    steps = (
        f"{p.name} has {n} * {m} = {whole} {thing}.",
        f"{p.They} has {whole} - {g} = {whole - g} {thing} left.",
    )
    short = (f"{p.They} has {n} * {m} - {g} = {whole - g} {thing} left.",)
    return Draft((n, m, g), asked, steps, whole - g, short)


def share_equally(rng: Random) -> Draft:
    """Two steps: two amounts put together and shared out."""
    p, thing, day = pick(rng, PEOPLE), pick(rng, FRUIT), pick(rng, DAYS)
    k, each = few(rng), some(rng)
    whole = k * each
    a = between(rng, 5, whole - 5)
    b = whole - a
    asked = pick(
        rng,
        (
            (
                f"{p.name} picks {a} {thing} on {day} and {b} {thing} the day after. {p.They}"
                f" shares them equally among {k} neighbours. How many does each get?"
            ),
            (
                f"A basket holds {a} {thing} and another holds {b}. {p.name} divides all of them"
                f" equally among {k} children. How many {thing} does each child get?"
            ),
        ),
    )
    steps = (
        f"There are {a} + {b} = {whole} {thing}.",
        f"Each gets {whole} / {k} = {each} {thing}.",
    )
    short = (f"Each gets ({a} + {b}) / {k} = {each} {thing}.",)
    return Draft((a, b, k), asked, steps, each, short)


def left_over(rng: Random) -> Draft:
    """Three steps: whole packs are filled; the rest is left over."""
    p, thing, packs = pick(rng, PEOPLE), pick(rng, BAKED), pick(rng, BOXES)
    n, m, size = few(rng), some(rng), between(rng, 4, 29)
    whole = n * m
    full, rest = whole // size, whole % size
    used = full * size
    asked = (
        f"{p.name} bakes {n} trays of {m} {thing}. {p.They} fills as many {packs} as {p.they} can"
        f" with {size} {thing} each. How many {thing} are left over?"
    )
    steps = (
        f"{p.name} bakes {n} * {m} = {whole} {thing}.",
        f"{p.They} fills {full} {packs} with {full} * {size} = {used} {thing}.",
        f"There are {whole} - {used} = {rest} {thing} left over.",
    )
    return Draft((n, m, size), asked, steps, rest)


def bus_stops(rng: Random) -> Draft:
    """Four steps: people get off and on twice."""
    ride = pick(rng, ("train", "ferry", "ship", "metro"))
    a = many(rng)
    off1, on1 = between(rng, 11, a - 5), some(rng)
    b = a - off1
    c = b + on1
    off2, on2 = between(rng, 5, c - 3), many(rng)
    d = c - off2
    asked = (
        f"A {ride} leaves with {a} people. At the first stop {off1} get off and {on1} get on. At"
        f" the second stop {off2} get off and {on2} get on. How many people are on the {ride} now?"
    )
    steps = (
        f"After {off1} get off there are {a} - {off1} = {b}.",
        f"Then {b} + {on1} = {c} people are on the {ride}.",
        f"At the second stop {c} - {off2} = {d} stay.",
        f"Now there are {d} + {on2} = {d + on2} people.",
    )
    short = (
        f"After the first stop there are {a} - {off1} + {on1} = {c} people.",
        f"Now there are {c} - {off2} + {on2} = {d + on2} people.",
    )
    return Draft((a, off1, on1, off2, on2), asked, steps, d + on2, short)


def orchard(rng: Random) -> Draft:
    """Three steps: rows of plants, their fruit, some sold."""
    p, (crop, thing) = pick(rng, PEOPLE), pick(rng, CROPS)
    rows, per_row, yields = few(rng), few(rng), some(rng)
    plants = rows * per_row
    whole = plants * yields
    sold = between(rng, 11, whole - 5)
    asked = (
        f"{p.name} plants {rows} rows of {per_row} {crop}. Each of them brings {yields} {thing}. "
        f"{p.They} sells {sold} {thing}. How many {thing} does {p.they} keep?"
    )
    steps = (
        f"There are {rows} * {per_row} = {plants} {crop}.",
        f"They bring {plants} * {yields} = {whole} {thing}.",
        f"{p.name} keeps {whole} - {sold} = {whole - sold} {thing}.",
    )
    short = (
        f"The {crop} bring {rows} * {per_row} * {yields} = {whole} {thing}.",
        f"{p.name} keeps {whole} - {sold} = {whole - sold} {thing}.",
    )
    return Draft((rows, per_row, yields, sold), asked, steps, whole - sold, short)


def machines(rng: Random) -> Draft:
    """Three steps: a rate, several machines, faulty ones taken off."""
    machine, thing = pick(rng, MADE)
    n, rate, hours = few(rng), some(rng), between(rng, 3, 9)
    hourly = n * rate
    whole = hourly * hours
    bad = between(rng, 5, whole - 5)
    asked = (
        f"A {machine} makes {rate} {thing} an hour."
        f" {pick(rng, ('A workshop', 'A factory', 'A town'))} runs {n} of them for {hours} hours."
        f" {bad} of the {thing} are faulty. How many are good?"
    )
    steps = (
        f"In an hour they make {n} * {rate} = {hourly} {thing}.",
        f"In {hours} hours they make {hourly} * {hours} = {whole} {thing}.",
        f"Of these {whole} - {bad} = {whole - bad} are good.",
    )
    short = (
        f"They make {n} * {rate} * {hours} = {whole} {thing}.",
        f"Of these {whole} - {bad} = {whole - bad} are good.",
    )
    return Draft((n, rate, hours, bad), asked, steps, whole - bad, short)


def part_of_group(rng: Random) -> Draft:
    """Two or three steps: a half, third or quarter goes; then some more."""
    event = pick(rng, EVENTS)
    word, k = pick(rng, (("half", 2), ("a third", 3), ("a quarter", 4), ("a fifth", 5)))
    part = many(rng) if k < 4 else some(rng)
    whole = part * k
    rest = whole - part
    late = between(rng, 3, rest - 2)
    asked = (
        f"{whole} people come to a {event}. {word.capitalize()} of them leave at the break and"
        f" {late} more leave before the end. How many stay until the end?"
    )
    steps = (
        f"At the break {whole} / {k} = {part} people leave.",
        f"Then {whole} - {part} = {rest} are there.",
        f"Until the end {rest} - {late} = {rest - late} stay.",
    )
    short = (
        f"After the break {whole} - {whole} / {k} = {rest} are there.",
        f"Until the end {rest} - {late} = {rest - late} stay.",
    )
    return Draft((whole, k, late), asked, steps, rest - late, short)


def work_backwards(rng: Random) -> Draft:
    """Two steps: from what is left to what there was."""
    p, thing = pick(rng, PEOPLE), pick(rng, KEEPSAKES)
    left, gave, k = many(rng), some(rng), between(rng, 2, 6)
    before = left + gave
    word = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 6: "a sixth"}[k]
    asked = (
        f"{p.name} kept only {word} of {p.their} {thing}. Then {p.they} lost {gave} of those and"
        f" had {left} left. How many {thing} did {p.they} have at first?"
    )
    steps = (
        f"Before losing any {p.they} had {left} + {gave} = {before} {thing}.",
        f"At first {p.they} had {before} * {k} = {before * k} {thing}.",
    )
    short = (f"At first {p.they} had ({left} + {gave}) * {k} = {before * k} {thing}.",)
    return Draft((left, gave, k), asked, steps, before * k, short)
