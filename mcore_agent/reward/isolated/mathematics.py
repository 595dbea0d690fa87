"""Whether two answers say the same number, set, interval or expression (M39)."""

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Equality, Expr

from mcore_agent.reward.isolated.units import ratio, split


def same(gold: list[str], answer: str) -> bool | None:
    """Whether ``answer`` equals one of ``gold``, all of them LaTeX without a box; None when one of ``gold`` cannot be read.

    Only LaTeX is read: the library's plain expressions go through an evaluator, and a model wrote this.
    """
    if not all(_read(each) for each in gold):
        return None
    return any(_equal(each, answer) for each in gold)


def _equal(gold: str, answer: str) -> bool:
    """The library leaves units out; where both have one, it is asked for the numbers alone, once the units agree."""
    (wanted, unit), (number, other) = split(gold), split(answer)
    if unit is None or other is None:
        return _verify(_read(gold), _read(answer))
    factor, found = ratio(other, unit), _read(number)
    if factor is None or not found:
        return False
    if factor != 1:
        value = found[0].rhs if isinstance(found[0], Equality) else found[0]
        found = [value * factor] if isinstance(value, Expr) else []
    return _verify(_read(wanted), found)


def _verify(gold: list, found: list) -> bool:
    return verify(gold, found, timeout_seconds=None, raise_on_error=True)


def _read(text: str) -> list:
    return parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None)
