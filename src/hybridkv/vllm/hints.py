"""The forms in which hints of a request (`core.hints`) reach a connector.

| form | who sends it |
|---|---|
| keys of `kv_transfer_params` that begin with "hybridkv." | clients that know this cache |
| `kv_hints` of a request, or `kv_hint` in its `kv_transfer_params` | orchestrators, as Dynamo |
| `kv_retention_ttl_seconds` in `vllm_xargs`, or in its `agentic_context` | clients of vllm-router |

Where several say something of one hint, that which stands first here is taken. What is not
understood is passed over and named. The work has a bound, whatever a client sends.
"""

import json
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, NamedTuple

from hybridkv.core.hints import NO_HINTS, PREFETCH_SECONDS_MAX, RETAIN_SECONDS_MAX, Hints

PREFIX = "hybridkv."
READ, WRITE = f"{PREFIX}read", f"{PREFIX}write"
RETAIN_SECONDS, RELEASE = f"{PREFIX}retain_seconds", f"{PREFIX}release"
DEMOTE, PRIORITY = f"{PREFIX}demote", f"{PREFIX}priority"
PREFETCH_IN_SECONDS = f"{PREFIX}prefetch_in_seconds"
WHY_UNREAD = f"it asks not to load anything ({READ} in kv_transfer_params)"
"""Why nothing is loaded for a request with `Hints.reads` false."""
TTL, CONTEXT = "kv_retention_ttl_seconds", "agentic_context"
CONTEXT_CHARACTERS_MAX = 16_384  # vllm-router takes no longer one either.
KEYS_MAX = 64  # Among so many keys of `kv_transfer_params` a mistaken one is found.
ACTIONS_MAX, DIRECTIVES_MAX = 16, 128  # Of one request, as vLLM's proposal for `kv.retain` has it.
SHOWN_MAX = 40  # Characters of a client's text in a sentence.


class HintMistake(NamedTuple):
    """Something that a client says and that is not understood."""

    name: str  # The key or the action. Each is named once in the log.
    sentence: str


class ReadHints(NamedTuple):
    """The hints of a request, and what was wrong with them."""

    hints: Hints = NO_HINTS
    mistakes: tuple[HintMistake, ...] = ()
    shortened: int = 0  # Times that were longer than the longest that has an effect.


class _Reader:
    """Reads the forms of one request, in the order of their precedence."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}
        self.mistakes: list[HintMistake] = []
        self.shortened = 0
        self.directives_left = DIRECTIVES_MAX

    def read_flag(self, hint: str, name: str, value: object) -> None:
        """Read true or false. Another value is taken for false."""
        if not isinstance(value, bool):
            self._mistake(name, f"is {_shown(value)}, and is taken for false: true and false work")
        self.said.setdefault(hint, value is True)

    def read_seconds(self, hint: str, name: str, value: object) -> None:
        """Read a time. One that is too long is shortened."""
        most = PREFETCH_SECONDS_MAX if hint == "prefetch_in_seconds" else RETAIN_SECONDS_MAX
        time = self._time(name, value, most)
        if time is not None:
            self.said.setdefault(hint, time)

    def read_priority(self, hint: str, name: str, value: object) -> None:
        """Read "low" or "normal"."""
        if value in ("low", "normal"):
            self.said.setdefault(hint, value == "low")
        else:
            text = f'is {_shown(value)}, and is passed over: "low" and "normal" work'
            self._mistake(name, text)

    def read_own_keys(self, params: Mapping[Any, Any]) -> None:
        """Read the keys of this project."""
        for key, rule in OWN_KEYS.items():
            if key in params:
                rule.read(self, rule.hint, key, params[key])
        for key in islice(params, KEYS_MAX):
            if isinstance(key, str) and key.startswith(PREFIX) and key not in OWN_KEYS:
                self._mistake(key, f"is no key: {', '.join(OWN_KEYS)} work")

    def read_envelope(self, envelope: object) -> None:
        """Read the actions of a KvHintsEnvelope, or of a dict with its fields."""
        actions = _field(envelope, "actions")
        for action in actions[:ACTIONS_MAX] if isinstance(actions, list) else ():
            kind, payload = _field(action, "action_type"), _field(action, "payload")
            payload = payload if isinstance(payload, Mapping) else {}
            name = f"kv_hints action {_shown(kind)}"
            kind = kind.removeprefix("kv.") if isinstance(kind, str) else ""
            if kind in ("retain", "pin"):
                self._retain(name, payload)
            elif kind in ("release", "evict"):
                self.said.setdefault("release", True)
            elif kind == "demote":
                self.said.setdefault("demote", True)
            elif kind == "prefetch":
                self.read_seconds("prefetch_in_seconds", name, payload.get("in_seconds", 0))
            else:
                text = "is not known: kv.retain, kv.release, kv.evict, kv.demote, kv.prefetch are"
                self._mistake(name, text)

    def _retain(self, name: str, payload: Mapping[Any, Any]) -> None:
        """Read the action `kv.retain`: as Dynamo's example sends it, or as vLLM has proposed it.

        Ranges of tokens are not distinguished. A priority of 0 releases. Without a time it is for
        as long as anything is retained.
        """
        directives = payload.get("directives", [payload])
        found = directives[: self.directives_left] if isinstance(directives, list) else []
        self.directives_left -= len(found)
        found = [directive for directive in found if isinstance(directive, Mapping)]
        kept = [directive for directive in found if directive.get("priority") != 0]
        times: list[float] = []
        if not found:
            self._mistake(name, "has no list of directives, and is passed over")
        elif not kept:
            self.said.setdefault("release", True)
        for each in kept:
            value = each.get("duration", each.get("ttl_seconds"))
            longest = RETAIN_SECONDS_MAX
            time = longest if value is None else self._time(name, value, longest)
            if time is not None:
                times.append(time)
        if times:
            self.said.setdefault("retain_seconds", max(times))

    def read_extra_args(self, extra_args: Mapping[Any, Any]) -> None:
        """Read what `vllm_xargs` become in the sampling parameters."""
        for name, args in ((TTL, extra_args), (f"{CONTEXT}.{TTL}", _context(extra_args))):
            if TTL in args:
                self.read_seconds("retain_seconds", name, args[TTL])

    def _time(self, name: str, value: object, most: float) -> float | None:
        """Return a time of at most `most` seconds. None = it is none."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            self._mistake(name, f"is {_shown(value)}, and is passed over: seconds, as 600, work")
            return None
        self.shortened += value > most
        return float(min(value, most))

    def _mistake(self, name: str, text: str) -> None:
        shown = name[:SHOWN_MAX]
        self.mistakes.append(HintMistake(shown, f"{shown} {text}"))


class KeyRule(NamedTuple):
    """How the value of a key is read, and the hint that it says."""

    read: Callable[[_Reader, str, str, object], None]
    hint: str


OWN_KEYS: Mapping[str, KeyRule] = {
    READ: KeyRule(_Reader.read_flag, "reads"),
    WRITE: KeyRule(_Reader.read_flag, "writes"),
    RETAIN_SECONDS: KeyRule(_Reader.read_seconds, "retain_seconds"),
    RELEASE: KeyRule(_Reader.read_flag, "release"),
    DEMOTE: KeyRule(_Reader.read_flag, "demote"),
    PRIORITY: KeyRule(_Reader.read_priority, "low_priority"),
    PREFETCH_IN_SECONDS: KeyRule(_Reader.read_seconds, "prefetch_in_seconds"),
}


def read_hints(request: Any) -> ReadHints:
    """Return the hints of vLLM's request, from all forms.

    >>> params = {"do_remote_decode": True, "hybridkv.write": False}
    >>> read_hints(SimpleNamespace(kv_transfer_params=params)).hints.asked_names()
    ['no_write']
    """
    params = getattr(request, "kv_transfer_params", None)
    envelope = getattr(request, "kv_hints", None)  # Since vLLM 0.31.
    extra_args = getattr(getattr(request, "sampling_params", None), "extra_args", None)
    if not params and not extra_args and envelope is None:
        return NO_FORM
    reader = _Reader()
    if isinstance(params, dict):
        reader.read_own_keys(params)
        reader.read_envelope(params.get("kv_hint"))
    reader.read_envelope(envelope)
    if isinstance(extra_args, dict):
        reader.read_extra_args(extra_args)
    return ReadHints(Hints(**reader.said), tuple(reader.mistakes), reader.shortened)


NO_FORM = ReadHints()


def _context(extra_args: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return vllm-router's context of an agent, which HTTP clients send as JSON text."""
    context = extra_args.get(CONTEXT)
    if isinstance(context, str) and len(context) <= CONTEXT_CHARACTERS_MAX:
        try:
            context = json.loads(context)
        except (ValueError, RecursionError):
            context = None  # vllm-router refuses it, where it is there.
    return context if isinstance(context, dict) else {}


def _field(item: object, name: str) -> Any:
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)


def _shown(value: object) -> str:
    """Return a value for a sentence, or its type where its text may be long."""
    if isinstance(value, str):
        return repr(value[:SHOWN_MAX])
    is_short = value is None or isinstance(value, bool | float)
    is_short = is_short or (isinstance(value, int) and abs(value) < 1 << 63)
    return repr(value) if is_short else f"a {type(value).__name__}"
