"""The prompts of the last lookups, by which commands name what is to be prefetched."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from hybridkv.tiers.prefetches import PromptKey, PromptNames

NAMES_BYTES_MAX = 16 << 20  # Bytes of the names of all prompts. The oldest are forgotten.
PROMPTS_MAX = 8192
COMPARED_MAX = 1024  # Prompts of a family that are looked at.


class RecentPrompts:
    """The names of the chunks of prompts that were looked up, the latest last."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[PromptKey, PromptNames] = OrderedDict()
        self.names_bytes = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def remember_prompt(self, prompt: PromptNames) -> None:
        """Keep a prompt that was looked up, instead of the oldest ones."""
        key, prompts = prompt.key, self._prompts
        earlier = prompts.pop(key, None)
        self.names_bytes += prompt.size_bytes - (earlier.size_bytes if earlier else 0)
        prompts[key] = prompt
        while self.names_bytes > NAMES_BYTES_MAX or len(prompts) > PROMPTS_MAX:
            self.names_bytes -= prompts.popitem(last=False)[1].size_bytes

    def find_asked(
        self, identity: bytes, first_chunk: bytes, chunks: int, count_max: int
    ) -> list[PromptNames]:
        """Return the prompts that a request may have had, the latest first.

        An engine reports the first chunk and their number, which several prompts may share.
        """
        found = (
            prompt
            for prompt in reversed(self._prompts.values())
            if prompt.chunks == chunks
            and prompt.hashes.startswith(first_chunk)
            and prompt.namespace.identity == identity
        )
        return list(islice(found, count_max))

    def find_family(self, start: bytes, count_max: int) -> list[PromptNames]:
        """Return prompts whose first chunk's hash begins with `start`, the latest first.

        A prompt that another one of them goes on is left out.
        """
        return list(islice(self._family(start), count_max))

    def _family(self, start: bytes) -> Iterator[PromptNames]:
        found: list[PromptNames] = []
        latest = reversed(self._prompts.values())
        family = (prompt for prompt in latest if prompt.hashes.startswith(start))
        for prompt in islice(family, COMPARED_MAX):
            if not any(longer.begins_with(prompt) for longer in found):
                found.append(prompt)
                yield prompt
