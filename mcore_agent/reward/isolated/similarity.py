"""How alike two sets of texts are (M74; SWE-RL, 2502.18449 sec. 2.2)."""

from difflib import SequenceMatcher


def mean_ratio(found: dict[str, str], wanted: dict[str, str]) -> float:
    """The mean, over the names of both, of the texts' matching ratio; 0 where one lacks a name, 1 when neither has any.

    ``abcd`` against ``abcf``: 2 * 3 / 8 = .75; with a second name that only one has, .375.
    """
    names = found.keys() | wanted.keys()
    if not names:
        return 1.0
    both = found.keys() & wanted.keys()
    return sum(SequenceMatcher(None, found[name], wanted[name], autojunk=False).ratio() for name in both) / len(names)
