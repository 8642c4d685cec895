"""What a check found: a state, a sentence, and the setting that works."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from hybridkv.core.errors import ConfigError


class Verdict(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of `hybridkv doctor`; what the connector raises where it is a FAIL."""

    check: str
    verdict: Verdict
    what: str
    remedy: str = ""
    """The clause that ends the sentence, like "--enable-prefix-caching works"."""

    @property
    def sentence(self) -> str:
        """`what` and `remedy` as one sentence."""
        return f"{self.what}; {self.remedy}" if self.remedy else self.what


def ok(check: str, what: str) -> Finding:
    """Nothing to do."""
    return Finding(check, Verdict.OK, what)


def warn(check: str, what: str, remedy: str = "") -> Finding:
    """It serves, but not as well as it could."""
    return Finding(check, Verdict.WARN, what, remedy)


def fail(check: str, what: str, remedy: str = "") -> Finding:
    """It is not served like this."""
    return Finding(check, Verdict.FAIL, what, remedy)


def failure(check: str, error: Exception) -> Finding:
    """A FAIL from an error of ours, whose message ends with what works."""
    what, _, remedy = str(error).partition("; ")
    return fail(check, what, remedy)


def raise_first(findings: Iterable[Finding]) -> list[Finding]:
    """All findings where none is a FAIL; else ConfigError with the first one's sentence."""
    passed = []
    for finding in findings:
        if finding.verdict is Verdict.FAIL:
            raise ConfigError(finding.sentence)
        passed.append(finding)
    return passed
