"""Which tools the turns of an episode call, by the run's parser."""

from mcore_agent import registry
from mcore_agent.protocols import Parser, ToolCall
from mcore_agent.types import Episode


def parser_of(name: str) -> Parser:
    """The parser of that name, without schemas. Raises RegistryError for an unknown one."""
    return registry.create("parser", {"name": name})


def calls_of(episode: Episode, parser: Parser) -> list[tuple[ToolCall, ...]]:
    """For each turn the calls in it; a malformed one has an ``error``."""
    return [parser.parse(turn.action).calls for turn in episode.turns]
