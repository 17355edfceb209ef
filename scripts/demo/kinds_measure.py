"""Kinds of problem about lengths, areas, weights, time and ages.

Each function draws the numbers and the words of one problem; its name is the kind's name. Every
step is a sentence with an equation, `a + b = c`, over whole numbers; `short` joins steps in one
equation. Knows nothing of the split, of files or of tokens.
"""

from random import Random

from words import (
    DAYS,
    FRUIT,
    KEEPSAKES,
    PEOPLE,
    PLACES,
    Draft,
    between,
    few,
    many,
    pair,
    pick,
    some,
)


def two_legs(rng: Random) -> Draft:
    """Three steps: two legs of a journey, each with its speed."""
    p, (place, other) = pick(rng, PEOPLE), pair(rng, PLACES)
    v, t, w, u = (
        between(rng, 31, 98),
        between(rng, 2, 12),
        between(rng, 31, 98),
        between(rng, 2, 12),
    )
    asked = (
        f"{p.name} drives to {place} for {t} hours at {v} km an hour and goes on to {other} for {u}"
        f" hours at {w} km an hour. How many km is that in all?"
    )
    steps = (
        f"The first part is {t} * {v} = {t * v} km.",
        f"The second part is {u} * {w} = {u * w} km.",
        f"In all it is {t * v} + {u * w} = {t * v + u * w} km.",
    )
    short = (f"In all it is {t} * {v} + {u} * {w} = {t * v + u * w} km.",)
    return Draft((t, v, u, w), asked, steps, t * v + u * w, short)


def fence(rng: Random) -> Draft:
    """Three steps: the way round a field and what its fence costs."""
    p, field = pick(rng, PEOPLE), pick(rng, ("garden", "field", "yard", "meadow", "park"))
    a, b, price = some(rng), some(rng), few(rng)
    half = a + b
    asked = (
        f"{p.name}'s {field} is {a} meters long and {b} meters wide. A meter of fence costs"
        f" ${price}. How much does a fence all round the {field} cost?"
    )
    steps = (
        f"Two sides are {a} + {b} = {half} meters.",
        f"All round it is {half} * 2 = {half * 2} meters.",
        f"The fence costs {half * 2} * {price} = {half * 2 * price} dollars.",
    )
    short = (
        f"All round it is ({a} + {b}) * 2 = {half * 2} meters.",
        f"The fence costs {half * 2} * {price} = {half * 2 * price} dollars.",
    )
    return Draft((a, b, price), asked, steps, half * 2 * price, short)


def area_left(rng: Random) -> Draft:
    """Three steps: an area with a smaller one taken out."""
    p = pick(rng, PEOPLE)
    thing, part = pick(
        rng, (("garden", "pond"), ("room", "carpet"), ("wall", "window"), ("field", "barn"))
    )
    a, b = some(rng), some(rng)
    c, d = between(rng, 2, max(a // 2, 2)), between(rng, 2, max(b // 2, 2))
    asked = (
        f"{p.name} has a {thing} of {a} by {b} meters. A {part} of {c} by {d} meters is in it. "
        f"How many square meters of the {thing} are free?"
    )
    steps = (
        f"The {thing} has {a} * {b} = {a * b} square meters.",
        f"The {part} has {c} * {d} = {c * d} square meters.",
        f"Free are {a * b} - {c * d} = {a * b - c * d} square meters.",
    )
    short = (f"Free are {a} * {b} - {c} * {d} = {a * b - c * d} square meters.",)
    return Draft((a, b, c, d), asked, steps, a * b - c * d, short)


def ages(rng: Random) -> Draft:
    """Three steps: an age from another; the sum of both some years on."""
    p, q = pair(rng, PEOPLE)
    a, d, n = between(rng, 4, 59), between(rng, 3, 39), between(rng, 2, 29)
    b = a + d
    asked = pick(
        rng,
        (
            (
                f"{p.name} is {a} years old and {q.name} is {d} years older. How old will they be"
                f" together in {n} years?"
            ),
            (
                f"{q.name} is {d} years older than {p.name}, who is {a}. What is the sum of their"
                f" ages in {n} years?"
            ),
        ),
    )
    steps = (
        f"{q.name} is {a} + {d} = {b} years old.",
        f"In {n} years {p.name} is {a} + {n} = {a + n} and {q.name} is {b} + {n} = {b + n}.",
        f"Together that is {a + n} + {b + n} = {a + b + 2 * n} years.",
    )
    return Draft((a, d, n), asked, steps, a + b + 2 * n)


def recipe(rng: Random) -> Draft:
    """Two steps: a recipe for more people."""
    p, thing = (
        pick(rng, PEOPLE),
        pick(rng, ("flour", "rice", "sugar", "butter", "cheese", "honey", "oats", "beans")),
    )
    serves, each, guests = between(rng, 2, 12), some(rng), few(rng)
    whole = serves * each
    asked = pick(
        rng,
        (
            (
                f"A recipe for {serves} people takes {whole} grams of {thing}. How many grams does"
                f" {p.name} need for {guests} people?"
            ),
            (
                f"{p.name} cooks for {guests} guests. For {serves} guests the dish takes {whole}"
                f" grams of {thing}. How many grams of {thing} does {p.they} need?"
            ),
        ),
    )
    steps = (
        f"One person needs {whole} / {serves} = {each} grams.",
        f"{guests} people need {guests} * {each} = {guests * each} grams of {thing}.",
    )
    short = (f"{p.They} needs {whole} / {serves} * {guests} = {guests * each} grams of {thing}.",)
    return Draft((serves, whole, guests), asked, steps, guests * each, short)


def tank(rng: Random) -> Draft:
    """Two steps: what is missing in a tank and the time to fill it."""
    thing = pick(rng, ("tank", "pool", "barrel", "pond", "well", "basin"))
    rate, minutes, has = some(rng), few(rng), many(rng)
    missing = rate * minutes
    holds = has + missing
    asked = pick(
        rng,
        (
            (
                f"A {thing} holds {holds} liters and has {has} liters in it. A pump adds {rate}"
                f" liters a minute. In how many minutes is the {thing} full?"
            ),
            (
                f"A hose brings {rate} liters a minute. The {thing} with {has} liters in it can"
                f" hold {holds} liters. How many minutes does it take to fill it?"
            ),
        ),
    )
    steps = (
        f"Missing are {holds} - {has} = {missing} liters.",
        f"That takes {missing} / {rate} = {minutes} minutes.",
    )
    short = (f"That takes ({holds} - {has}) / {rate} = {minutes} minutes.",)
    return Draft((holds, has, rate), asked, steps, minutes, short)


def reading(rng: Random) -> Draft:
    """Three steps: pages read, pages left, pages a day."""
    p = pick(rng, PEOPLE)
    a, d, days, each = between(rng, 11, 48), few(rng), between(rng, 2, 12), between(rng, 11, 68)
    read, rest = a * d, days * each
    pages = read + rest
    asked = (
        f"A book has {pages} pages. {p.name} reads {a} pages a day for {d} days. {p.They} wants to"
        f" read the rest in {days} days. How many pages a day is that?"
    )
    steps = (
        f"{p.name} has read {a} * {d} = {read} pages.",
        f"There are {pages} - {read} = {rest} pages to go.",
        f"That is {rest} / {days} = {each} pages a day.",
    )
    short = (
        f"There are {pages} - {a} * {d} = {rest} pages to go.",
        f"That is {rest} / {days} = {each} pages a day.",
    )
    return Draft((pages, a, d, days), asked, steps, each, short)


def average(rng: Random) -> Draft:
    """Three steps: the mean of three numbers."""
    p, day = pick(rng, PEOPLE), pick(rng, DAYS)
    mean = many(rng)
    up, down = between(rng, 1, mean // 3), between(rng, 1, mean // 3)
    a, b, c = mean + up, mean - down, mean - up + down
    what = pick(
        rng,
        (
            "scores {} points",
            "walks {} steps",
            "counts {} cars",
            "sells {} papers",
            "sees {} birds",
        ),
    )
    unit = what.split()[-1]
    asked = (
        f"{p.name} {what.format(a)} on {day}, {b} the day after and {c} on the third day. "
        f"How many {unit} is that a day on average?"
    )
    steps = (
        f"Two days make {a} + {b} = {a + b} {unit}.",
        f"Three days make {a + b} + {c} = {3 * mean} {unit}.",
        f"The average is {3 * mean} / 3 = {mean} {unit}.",
    )
    short = (f"The average is ({a} + {b} + {c}) / 3 = {mean} {unit}.",)
    return Draft((a, b, c), asked, steps, mean, short)


def ribbon(rng: Random) -> Draft:
    """Two steps: pieces cut off; what is left."""
    p, thing = (
        pick(rng, PEOPLE),
        pick(rng, ("ribbon", "rope", "wire", "cloth", "string", "pipe", "cable")),
    )
    n, size = some(rng), some(rng)
    used, rest = n * size, many(rng)
    asked = pick(
        rng,
        (
            (
                f"A {thing} is {used + rest} cm long. {p.name} cuts off {n} pieces of {size} cm."
                " How many cm are left?"
            ),
            (
                f"{p.name} cuts {n} pieces, each {size} cm long, from {used + rest} cm of {thing}."
                " What length is left?"
            ),
        ),
    )
    steps = (
        f"The pieces are {n} * {size} = {used} cm.",
        f"Left are {used + rest} - {used} = {rest} cm.",
    )
    short = (f"Left are {used + rest} - {n} * {size} = {rest} cm.",)
    return Draft((used + rest, n, size), asked, steps, rest, short)


def loaded_truck(rng: Random) -> Draft:
    """Four steps: two loads on a truck; what it weighs."""
    (load, other), empty = pair(rng, FRUIT + KEEPSAKES), between(rng, 1010, 9850)
    n, a, m, b = some(rng), few(rng), some(rng), few(rng)
    both = n * a + m * b
    asked = (
        f"An empty truck weighs {empty} kg. It takes {n} crates of {load}, {a} kg each, and {m}"
        f" crates of {other}, {b} kg each. What does the loaded truck weigh in kg?"
    )
    steps = (
        f"The {load} weigh {n} * {a} = {n * a} kg.",
        f"The {other} weigh {m} * {b} = {m * b} kg.",
        f"The load weighs {n * a} + {m * b} = {both} kg.",
        f"The truck weighs {empty} + {both} = {empty + both} kg.",
    )
    short = (f"The truck weighs {empty} + {n} * {a} + {m} * {b} = {empty + both} kg.",)
    return Draft((empty, n, a, m, b), asked, steps, empty + both, short)


def practice(rng: Random) -> Draft:
    """Five steps: minutes of practice on some days and others, against an aim."""
    p, what = (
        pick(rng, PEOPLE),
        pick(rng, ("the piano", "the violin", "chess", "singing", "the drums", "dancing")),
    )
    a, n, b, m = between(rng, 12, 98), between(rng, 2, 7), between(rng, 12, 98), between(rng, 2, 7)
    week = a * n + b * m
    weeks = between(rng, 2, 14)
    whole = week * weeks
    aim = whole + many(rng)
    asked = (
        f"Each week {p.name} practices {what} {a} minutes on {n} mornings and {b} minutes on {m}"
        f" evenings. The aim is {aim} minutes. How many minutes are missing after {weeks} weeks?"
    )
    steps = (
        f"The mornings make {n} * {a} = {n * a} minutes.",
        f"The evenings make {m} * {b} = {m * b} minutes.",
        f"A week has {n * a} + {m * b} = {week} minutes.",
        f"{weeks} weeks have {weeks} * {week} = {whole} minutes.",
        f"Missing are {aim} - {whole} = {aim - whole} minutes.",
    )
    short = (
        f"A week has {n} * {a} + {m} * {b} = {week} minutes.",
        f"Missing are {aim} - {weeks} * {week} = {aim - whole} minutes.",
    )
    return Draft((a, n, b, m, weeks, aim), asked, steps, aim - whole, short)


def film_night(rng: Random) -> Draft:
    """Four steps: films with breaks between them, in minutes."""
    p = pick(rng, PEOPLE)
    n, length, pause = between(rng, 3, 14), between(rng, 72, 189), between(rng, 4, 29)
    shown, rest = n * length, (n - 1) * pause
    what = pick(rng, ("films", "talks", "games", "lessons"))
    asked = (
        f"{p.name} goes to {n} {what} of {length} minutes each, one after the other, with a break"
        f" of {pause} minutes between every two. How many minutes is that in all?"
    )
    steps = (
        f"The {what} take {n} * {length} = {shown} minutes.",
        f"There are {n} - 1 = {n - 1} breaks.",
        f"The breaks take {n - 1} * {pause} = {rest} minutes.",
        f"In all that is {shown} + {rest} = {shown + rest} minutes.",
    )
    short = (f"In all that is {n} * {length} + {n - 1} * {pause} = {shown + rest} minutes.",)
    return Draft((n, length, pause), asked, steps, shown + rest, short)
