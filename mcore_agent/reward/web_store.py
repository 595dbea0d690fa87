"""How well what an episode bought fits what was asked for (M39; WebShop, 2207.01206 sec. 3)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_agent.registry import register
from mcore_agent.reward.children import VerifierError
from mcore_agent.reward.texts import gold_mapping
from mcore_agent.reward.web_state import state_of
from mcore_agent.types import Episode

WORDS = re.compile(r"[a-z0-9]+")


@register("reward", "web_store")
@dataclass(frozen=True)
class WebStore:
    """``type * (attributes met + options met + price met) / (attributes + options + 1)``, 0 when nothing was bought.

    ``type`` says whether it is the right kind of thing, by the share of the words of the wanted name that its name has: 0 for none,
    .1 below .1, .5 up to .2, else 1; between .1 and .2 also 1 when it was found by the same ``query``, or shares two ``categories``.

    The last turn's ``state_key`` is a JSON object with the bought product at ``at``: ``{"name": text, "attributes": […], "options":
    {name: value}, "price": number}`` and, if known, ``query`` and ``categories``; gold has the same fields, its price is the most to
    pay. An environment must leave the policy a turn after it bought, for the state is what that turn saw. Texts are equal when their
    words are (the paper's code takes the nouns of names, and accepts texts that are nearly alike).

    A red lamp for 20, where a red, large one for at most 15 is wanted, attributes ``led`` and ``dimmable``, of which it has one:
    1 * (1 + 1 + 0) / (2 + 2 + 1) = .4.
    """

    at: str = "bought"
    key: str = "web_store"

    def score(self, episode: Episode) -> dict[str, float | list[float]]:
        """``{key: value in [0, 1]}``. Raises VerifierError for gold or a product without a name or a price, or a state that is no JSON."""
        wanted = _product(gold_mapping(episode), "gold", f"the gold of task {episode.task.id!r}")
        bought = state_of(episode).get(self.at) if episode.turns else None
        return {self.key: 0.0 if bought is None else grade(_product(bought, "setup", f"episode {episode.id!r}: what it bought"), wanted)}


def grade(bought: Mapping[str, Any], wanted: Mapping[str, Any]) -> float:
    """The formula of ``WebStore``."""
    has, needs = ({_words(each) for each in product.get("attributes", ())} for product in (bought, wanted))
    chosen, choose = ({(_words(name), _words(value)) for name, value in product.get("options", {}).items()} for product in (bought, wanted))
    met = len(has & needs) + len(chosen & choose) + (bought["price"] <= wanted["price"])
    return _type(bought, wanted) * met / (len(needs) + len(choose) + 1)


def _type(bought: Mapping[str, Any], wanted: Mapping[str, Any]) -> float:
    found, name = set(_words(bought["name"])), set(_words(wanted["name"]))
    share = len(found & name) / len(name)
    if share < 0.1:
        return 0.1 if share > 0 else 0.0
    asked = bought.get("query"), wanted.get("query")
    kinds = [{_words(each) for each in product.get("categories", ())} for product in (bought, wanted)]
    alike = (asked[0] is not None and asked[0] == asked[1]) or len(kinds[0] & kinds[1]) >= 2
    return 1.0 if share > 0.2 or alike else 0.5


def _words(text: Any) -> tuple[str, ...]:
    return tuple(WORDS.findall(str(text).lower()))


def _product(given: Any, kind: str, whose: str) -> Mapping[str, Any]:
    """A product that can be graded. Raises VerifierError for another."""
    good = isinstance(given, Mapping) and isinstance(given.get("name"), str) and _words(given["name"])
    if not good or not isinstance(given.get("price"), (int, float)) or not isinstance(given.get("options", {}), Mapping):
        raise VerifierError(kind, f"{whose} is {given!r}, but needs a name with words, a price, and options as a mapping if any")
    return given
