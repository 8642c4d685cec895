"""Where the tokens of a load came from."""

from collections.abc import Mapping

RAM = "ram"
"""The tier that every load reads; the tiers below it have names of their own."""


def tokens_by_tier(
    loaded_tokens: int, chunk_tokens: int, promoted: Mapping[str, int]
) -> dict[str, int]:
    """Non-zero tokens of one load by tier; their sum is `loaded_tokens`.

    `promoted` has the chunks of the hit that were promoted for it, by tier, prefix first
    (Found.tiers). They are taken for the last chunks of the hit: RAM evicts suffixes before
    prefixes, and the load leaves out the prefix that the engine has itself.
    """
    tokens: dict[str, int] = {}
    left = max(0, loaded_tokens)
    for tier, chunks in reversed(list(promoted.items())):
        given = min(left, max(0, chunks) * chunk_tokens)
        if given:
            tokens[tier] = given
        left -= given
    if left:
        tokens[RAM] = tokens.get(RAM, 0) + left
    return tokens
