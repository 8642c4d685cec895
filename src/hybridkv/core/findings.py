"""The finding of a check: a verdict, what was found, and the setting that works."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from hybridkv.core.errors import ConfigError, RemediedError


class Verdict(StrEnum):
    """The result of a check: the engine is served well, less well, or not at all."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


class Check(StrEnum):
    """Checks that a command selects by name. Each value is what people read."""

    CONNECTOR = "connector"
    KV_ROLE = "kv_role"
    SETTINGS = "settings"
    SPECULATIVE_DECODING = "speculative decoding"
    FIRST_HIT = "first hit"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of `hybridkv doctor`. The connector raises each FAIL but `length_finding`'s."""

    check: str  # What was checked, like "group 2"; a Check where a command selects it.
    verdict: Verdict
    what: str
    remedy: str = ""  # The clause that ends the sentence, like "--enable-prefix-caching works".

    @property
    def sentence(self) -> str:
        """`what` and `remedy` as one sentence."""
        return f"{self.what}; {self.remedy}" if self.remedy else self.what


def ok(check: str, what: str) -> Finding:
    """Returns an OK: nothing must be done."""
    return Finding(check, Verdict.OK, what)


def warn(check: str, what: str, remedy: str = "") -> Finding:
    """Returns a WARN: the engine is served, but not as well as it could be."""
    return Finding(check, Verdict.WARN, what, remedy)


def fail(check: str, what: str, remedy: str = "") -> Finding:
    """Returns a FAIL: the engine is not served like this."""
    return Finding(check, Verdict.FAIL, what, remedy)


def judge(
    check: str, is_good: object, good: str, what: str, remedy: str, bad: Verdict = Verdict.FAIL
) -> Finding:
    """Returns an OK with `good` where `is_good`, else a `bad` with `what` and `remedy`."""
    return ok(check, good) if is_good else Finding(check, bad, what, remedy)


def failure(check: str, error: Exception) -> Finding:
    """Returns a FAIL from an error. The remedy is empty where the error has none."""
    if isinstance(error, RemediedError):
        return fail(check, error.what, error.remedy)
    return fail(check, str(error))


def raise_first(findings: Iterable[Finding]) -> list[Finding]:
    """Returns all findings. Raises ConfigError for the first FAIL."""
    passed = []
    for finding in findings:
        if finding.verdict is Verdict.FAIL:
            raise ConfigError(finding.what, finding.remedy)
        passed.append(finding)
    return passed
