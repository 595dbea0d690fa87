"""Units of measurement at the end of an answer: read, and turned into one another (M39)."""

import re

from sympy import Expr, Integer, simplify
from sympy.physics import units
from sympy.physics.units import convert_to
from sympy.physics.units.quantities import PhysicalConstant, Quantity

BASE = (units.meter, units.kilogram, units.second, units.ampere, units.kelvin, units.mole, units.candela, units.byte)
NO_UNITS = {"percent", "percents", "permille", "au", "me", "t", "deg", "degree", "degrees", "mil", "rad", "radian", "radians"}
NAMES: dict[str, Expr] = {
    name: value
    for name, value in vars(units).items()
    if isinstance(value, Quantity) and not isinstance(value, PhysicalConstant) and name not in NO_UNITS
}
NAMES |= {"hr": units.hour, "hrs": units.hour, "min": units.minute, "mins": units.minute, "sec": units.second, "secs": units.second}
NAMES |= {"mph": units.mile / units.hour, "kph": units.kilometer / units.hour, "in": units.inch, "lb": units.pound, "lbs": units.pound}
POWERS = {"square": 2, "sq": 2, "cubic": 3}

BLANK = re.compile(r"(?:\\[ ,;:!]|\\q?quad\b|~|\s)+")
WRAPPED = re.compile(r"\\(?:text|textrm|textnormal|mathrm|mbox|rm)\s*\{([^{}]*)\}")
WORD = r"[A-Za-z]+ ?(?:\^ ?\{? ?-?\d+ ?\}?)?"
# A letter right beside a number is a variable; a word is not.
QUANTITY = re.compile(rf"(.*?[\d)}}\]])(?: (?=[A-Za-z])|(?=[A-Za-z]{{2}}))({WORD}(?: ?(?:/|\*|\\cdot\b|) ?{WORD})*)\.?")
PART = re.compile(r"(/)?[ *]*(?:\\cdot\b)? ?([A-Za-z]+) ?(?:\^ ?\{? ?(-?\d+))?")


def split(text: str) -> tuple[str, Expr | None]:
    """A quantity's number and its unit; the whole text and None where it does not end in a known unit.

    ``5\\text{ km/h}``: ``5`` and kilometer / hour; ``5x``: ``5x`` and None.
    """
    found = QUANTITY.fullmatch(BLANK.sub(" ", WRAPPED.sub(r" \1 ", text)).strip())
    unit = _unit(found[2]) if found else None
    return (found[1], unit) if found and unit is not None else (text, None)


def _unit(text: str) -> Expr | None:
    """``m/s^2``, ``square feet``, ``km per hour``; None when a word is no unit."""
    out, sign, power = Integer(1), 1, 1
    for slash, word, exponent in PART.findall(text):
        sign = -1 if slash else sign
        if word == "per":
            sign = -1
        elif word in POWERS:
            power = POWERS[word]
        elif (unit := NAMES.get(word, NAMES.get(word.lower() if len(word) > 2 else word))) is None:
            return None
        else:
            out, sign, power = out * unit ** (sign * power * int(exponent or 1)), 1, 1
    return out


def ratio(one: Expr, other: Expr) -> Expr | None:
    """How many of ``other`` are one of ``one``: 1000 for kilometer and meter; None when they measure different things."""
    value = simplify(convert_to(one / other, BASE))
    return None if value.has(Quantity) else value
