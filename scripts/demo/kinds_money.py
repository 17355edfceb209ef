"""Kinds of problem about prices, wages and savings.

Each function draws the numbers and the words of one problem; its name is the kind's name. Every
step is a sentence with an equation, `a + b = c`, over whole dollars; `short` joins steps in one
equation. Knows nothing of the split, of files or of tokens.
"""

from random import Random

from words import (
    BAKED,
    EVENTS,
    FRUIT,
    GOODS,
    MONTHS,
    PEOPLE,
    SHOPS,
    Draft,
    between,
    few,
    many,
    pair,
    pick,
    some,
)


def change(rng: Random) -> Draft:
    """Two steps: the price of several things, the change."""
    p, thing = pick(rng, PEOPLE), pick(rng, GOODS)
    n, price = few(rng), some(rng)
    cost = n * price
    paid = (cost // 100 + 1) * 100 if rng.random() < 0.5 else cost + some(rng)
    asked = pick(
        rng,
        (
            (
                f"{p.name} buys {n} {thing} at ${price} each and pays with ${paid}. How much change"
                f" does {p.they} get?"
            ),
            (
                f"One of the {thing} costs ${price}. {p.name} has ${paid} and buys {n} of them. How"
                " many dollars are left?"
            ),
        ),
    )
    steps = (
        f"The {thing} cost {n} * {price} = {cost} dollars.",
        f"{p.name} has {paid} - {cost} = {paid - cost} left.",
    )
    short = (f"{p.name} has {paid} - {n} * {price} = {paid - cost} left.",)
    return Draft((n, price, paid), asked, steps, paid - cost, short)


def two_goods(rng: Random) -> Draft:
    """Three steps: two sorts of things bought; what they cost in all."""
    p, (thing, other) = pick(rng, PEOPLE), pair(rng, GOODS)
    n, a, m, b = few(rng), some(rng), few(rng), some(rng)
    asked = pick(
        rng,
        (
            (
                f"At the {pick(rng, SHOPS)} {p.name} buys {n} {thing} for ${a} each and {m} {other}"
                f" for ${b} each. How much does {p.they} pay?"
            ),
            (
                f"{p.name} sells {n} {thing} at ${a} each and {m} {other} at ${b} each. What does"
                f" {p.they} get for all?"
            ),
        ),
    )
    steps = (
        f"The {thing} make {n} * {a} = {n * a} dollars.",
        f"The {other} make {m} * {b} = {m * b} dollars.",
        f"In all that is {n * a} + {m * b} = {n * a + m * b} dollars.",
    )
    short = (f"In all that is {n} * {a} + {m} * {b} = {n * a + m * b} dollars.",)
    return Draft((n, a, m, b), asked, steps, n * a + m * b, short)


def tickets(rng: Random) -> Draft:
    """Four steps: adults and children pay; the costs come off."""
    event = pick(rng, EVENTS)
    a, x, c, y = many(rng), few(rng), many(rng), between(rng, 2, 9)
    grown, young = a * x, c * y
    both = grown + young
    cost = between(rng, 101, both - 50)
    asked = (
        f"{a} adults and {c} children come to a {event}. A ticket is ${x} for an adult and ${y} for"
        f" a child. The {event} costs ${cost}. How many dollars are left?"
    )
    steps = (
        f"The adults pay {a} * {x} = {grown} dollars.",
        f"The children pay {c} * {y} = {young} dollars.",
        f"Together they pay {grown} + {young} = {both} dollars.",
        f"After the costs {both} - {cost} = {both - cost} dollars are left.",
    )
    short = (
        f"Together they pay {a} * {x} + {c} * {y} = {both} dollars.",
        f"After the costs {both} - {cost} = {both - cost} dollars are left.",
    )
    return Draft((a, x, c, y, cost), asked, steps, both - cost, short)


def saving_up(rng: Random) -> Draft:
    """Two steps: weekly savings; what is still missing."""
    p, thing = (
        pick(rng, PEOPLE),
        pick(rng, ("bicycle", "tent", "guitar", "camera", "piano", "boat", "laptop", "trip")),
    )
    weekly, weeks = some(rng), few(rng)
    saved = weekly * weeks
    missing = many(rng)
    price = saved + missing
    asked = pick(
        rng,
        (
            (
                f"{p.name} saves ${weekly} a week for {weeks} weeks. A {thing} costs ${price}. "
                f"How many dollars does {p.they} still need?"
            ),
            (
                f"A {thing} costs ${price}. {p.name} puts ${weekly} aside every week. How much is"
                f" missing after {weeks} weeks?"
            ),
        ),
    )
    steps = (
        f"{p.name} saves {weekly} * {weeks} = {saved} dollars.",
        f"{p.They} still needs {price} - {saved} = {missing} dollars.",
    )
    short = (f"{p.They} still needs {price} - {weekly} * {weeks} = {missing} dollars.",)
    return Draft((weekly, weeks, price), asked, steps, missing, short)


def wages(rng: Random) -> Draft:
    """Three steps: hours, pay, rent taken off."""
    p, month = pick(rng, PEOPLE), pick(rng, MONTHS)
    rate, hours, days = between(rng, 11, 39), between(rng, 4, 9), between(rng, 11, 26)
    worked = hours * days
    pay = worked * rate
    rent = between(rng, 101, pay - 11)
    job = pick(
        rng,
        (
            "in a library",
            "in a garden",
            "at a hotel",
            "on a farm",
            "in an office",
            "at the harbour",
        ),
    )
    asked = (
        f"In {month} {p.name} works {job} for {hours} hours a day on {days} days and gets ${rate}"
        f" an hour. {p.They} pays ${rent} for rent. How much is left?"
    )
    steps = (
        f"{p.name} works {hours} * {days} = {worked} hours.",
        f"{p.They} gets {worked} * {rate} = {pay} dollars.",
        f"After the rent {pay} - {rent} = {pay - rent} dollars are left.",
    )
    short = (
        f"{p.name} gets {hours} * {days} * {rate} = {pay} dollars.",
        f"After the rent {pay} - {rent} = {pay - rent} dollars are left.",
    )
    return Draft((hours, days, rate, rent), asked, steps, pay - rent, short)


def discount(rng: Random) -> Draft:
    """Four steps: a price, per cent off it, several of them."""
    p, thing = pick(rng, PEOPLE), pick(rng, GOODS)
    price, off, n = between(rng, 2, 49) * 20, between(rng, 1, 15) * 5, few(rng)
    less = price * off // 100
    now = price - less
    asked = pick(
        rng,
        (
            (
                f"A set of {thing} costs ${price}. In the sale it is {off} percent off. How much do"
                f" {n} sets cost {p.name} in the sale?"
            ),
            (
                f"{p.name} buys {n} sets of {thing} with {off} percent off. A set is ${price}"
                f" without that. How many dollars does {p.they} pay?"
            ),
        ),
    )
    steps = (
        (
            f"{off} percent of {price} is {price} * {off} = {price * off}, and {price * off} / 100"
            f" = {less}."
        ),
        f"A set costs {price} - {less} = {now} dollars.",
        f"{n} sets cost {n} * {now} = {n * now} dollars.",
    )
    short = (
        f"A set costs {price} - {price} * {off} / 100 = {now} dollars.",
        f"{n} sets cost {n} * {now} = {n * now} dollars.",
    )
    return Draft((price, off, n), asked, steps, n * now, short)


def profit(rng: Random) -> Draft:
    """Three steps: bought, sold, the profit."""
    p, thing = pick(rng, PEOPLE), pick(rng, GOODS)
    n, a = some(rng), some(rng)
    b = a + between(rng, 2, a)
    asked = pick(
        rng,
        (
            (
                f"{p.name} buys {n} {thing} at ${a} each and sells all of them at ${b} each. What"
                f" is {p.their} profit?"
            ),
            (
                f"A {pick(rng, SHOPS)} pays ${a} each for {n} {thing} and sells each for ${b}. What"
                " does it earn on them?"
            ),
        ),
    )
    steps = (
        f"The {thing} cost {n} * {a} = {n * a} dollars.",
        f"They sell for {n} * {b} = {n * b} dollars.",
        f"The profit is {n * b} - {n * a} = {n * (b - a)} dollars.",
    )
    short = (f"The profit is {n} * {b} - {n} * {a} = {n * (b - a)} dollars.",)
    return Draft((n, a, b), asked, steps, n * (b - a), short)


def eggs(rng: Random) -> Draft:
    """Four steps: eggs laid over days, packed by the dozen, sold."""
    p = pick(rng, PEOPLE)
    hens, days, price = between(rng, 2, 33) * 6, between(rng, 2, 40) * 2, between(rng, 3, 19)
    laid = hens * days
    dozens = laid // 12
    feed = between(rng, 5, dozens * price - 1)
    asked = (
        f"{p.name} has {hens} hens. Each lays an egg a day. After {days} days {p.they} sells all"
        f" the eggs at ${price} a dozen and pays ${feed} for feed. How many dollars does {p.they}"
        " keep?"
    )
    steps = (
        f"There are {hens} * {days} = {laid} eggs.",
        f"That is {laid} / 12 = {dozens} dozen.",
        f"They bring {dozens} * {price} = {dozens * price} dollars.",
        f"{p.name} keeps {dozens * price} - {feed} = {dozens * price - feed} dollars.",
    )
    short = (
        f"There are {hens} * {days} / 12 = {dozens} dozen.",
        f"{p.name} keeps {dozens} * {price} - {feed} = {dozens * price - feed} dollars.",
    )
    return Draft((hens, days, price, feed), asked, steps, dozens * price - feed, short)


def compare_savings(rng: Random) -> Draft:
    """Three steps: two people save; the difference."""
    p, q = pair(rng, PEOPLE)
    a, n, b, m = some(rng), few(rng), some(rng), few(rng)
    if a * n < b * m:
        a, n, b, m = b, m, a, n
    asked = (
        f"{p.name} saves ${a} a month for {n} months. {q.name} saves ${b} a month for {m} months. "
        f"How many dollars more does {p.name} have than {q.name}?"
    )
    steps = (
        f"{p.name} saves {a} * {n} = {a * n} dollars.",
        f"{q.name} saves {b} * {m} = {b * m} dollars.",
        f"{p.name} has {a * n} - {b * m} = {a * n - b * m} dollars more.",
    )
    short = (f"{p.name} has {a} * {n} - {b} * {m} = {a * n - b * m} dollars more.",)
    return Draft((a, n, b, m), asked, steps, a * n - b * m, short)


def split_bill(rng: Random) -> Draft:
    """Three steps: a bill with a tip, shared out."""
    p, (dish, other) = pick(rng, PEOPLE), (pick(rng, BAKED), pick(rng, FRUIT))
    k, each = few(rng), some(rng)
    whole = k * each
    tip = between(rng, 2, max(whole // 5, 3))
    a = between(rng, 2, whole - tip - 1)
    b = whole - tip - a
    asked = (
        f"{p.name} and {p.their} friends are {k} people. They order {dish} for ${a} and {other} for"
        f" ${b} and leave a tip of ${tip}. They share the cost equally. How many dollars does each"
        " pay?"
    )
    steps = (
        f"The food costs {a} + {b} = {a + b} dollars.",
        f"With the tip it is {a + b} + {tip} = {whole} dollars.",
        f"Each pays {whole} / {k} = {each} dollars.",
    )
    short = (f"Each pays ({a} + {b} + {tip}) / {k} = {each} dollars.",)
    return Draft((k, a, b, tip), asked, steps, each, short)
