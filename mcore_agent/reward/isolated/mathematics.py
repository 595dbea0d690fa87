"""Whether two answers say the same number, set, interval or expression."""

from math_verify import LatexExtractionConfig, parse, verify


def same(gold: list[str], answer: str) -> bool | None:
    """Whether ``answer`` equals one of ``gold``, all of them LaTeX without a box; None when one of ``gold`` cannot be read.

    Only LaTeX is read: the library's plain expressions go through an evaluator, and a model wrote this.
    """
    golds = [_read(each) for each in gold]
    if not all(golds):
        return None
    found = _read(answer)
    return any(verify(each, found, timeout_seconds=None, raise_on_error=True) for each in golds)


def _read(text: str) -> list:
    return parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None)
