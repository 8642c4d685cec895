"""Where the tokens of a load came from."""

from collections.abc import Mapping

RAM = "ram"
"""The tier that everything is loaded out of; the tiers below it have names of their own."""


def tokens_by_tier(loaded_tokens: int, chunk_tokens: int, came_up: Mapping[str, int]) -> dict[str, int]:
    """Non-zero tokens of one load by tier; they sum up to `loaded_tokens`.

    `came_up` says how many chunks of the hit came up for it, by tier and prefix first (wire.messages.Found). They are
    taken for the last ones of the hit: RAM evicts suffixes before prefixes, and what is not loaded is the prefix that
    the engine has itself.
    """
    tokens: dict[str, int] = {}
    left = max(0, loaded_tokens)
    for tier, chunks in reversed(list(came_up.items())):
        given = min(left, max(0, chunks) * chunk_tokens)
        if given:
            tokens[tier] = given
        left -= given
    if left:
        tokens[RAM] = tokens.get(RAM, 0) + left
    return tokens
