"""The finding of a check: a verdict, what was found, and the setting that works."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from hybridkv.core.errors import ConfigError, RemediedError


class Verdict(StrEnum):
    """Whether an engine is served as it is configured."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


class Check(StrEnum):
    """Checks that a command selects by name. Each value is what people read."""

    CONNECTOR = "connector"
    KV_ROLE = "kv_role"
    KV_LOAD_FAILURE_POLICY = "kv_load_failure_policy"
    SETTINGS = "settings"
    SPECULATIVE_DECODING = "speculative decoding"
    FIRST_HIT = "first hit"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of `hybridkv doctor`; the connector raises a FAIL, but that of `length_finding`."""

    check: str  # What was checked, like "group 2"; a Check where a command selects it.
    verdict: Verdict
    what: str
    remedy: str = ""  # The clause that ends the sentence, like "--enable-prefix-caching works".

    @property
    def sentence(self) -> str:
        """`what` and `remedy` as one sentence."""
        return f"{self.what}; {self.remedy}" if self.remedy else self.what


def ok(check: str, what: str) -> Finding:
    """Nothing must be done."""
    return Finding(check, Verdict.OK, what)


def warn(check: str, what: str, remedy: str = "") -> Finding:
    """The engine is served, but not as well as it could be."""
    return Finding(check, Verdict.WARN, what, remedy)


def fail(check: str, what: str, remedy: str = "") -> Finding:
    """The engine is not served like this."""
    return Finding(check, Verdict.FAIL, what, remedy)


def judge(
    check: str, is_good: object, good: str, what: str, remedy: str, bad: Verdict = Verdict.FAIL
) -> Finding:
    """OK and `good`, or else `bad`, with `what` is wrong and the `remedy`."""
    return ok(check, good) if is_good else Finding(check, bad, what, remedy)


def failure(check: str, error: Exception) -> Finding:
    """A FAIL from an error; the remedy is empty where the error has none."""
    if isinstance(error, RemediedError):
        return fail(check, error.what, error.remedy)
    return fail(check, str(error))


def raise_first(findings: Iterable[Finding]) -> list[Finding]:
    """All findings where none is a FAIL; else ConfigError with the first one's sentence."""
    passed = []
    for finding in findings:
        if finding.verdict is Verdict.FAIL:
            raise ConfigError(finding.what, finding.remedy)
        passed.append(finding)
    return passed
