"""The exceptions to the ratchets: a list that only gets shorter.

An exception that is larger than needed, or not needed, fails the test.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.architecture.source import Finding

Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Allowed:
    """`size` is what it measures today: statements, parameters, or the findings in the file."""

    rule: str
    path: str
    size: int
    reason: str
    where: str = ""

    @property
    def key(self) -> Key:
        return self.rule, self.path, self.where


EXCEPTIONS: tuple[Allowed, ...] = (
    Allowed(
        "skip",
        "tests/e2e/test_node_client.py",
        1,
        "the client for Node is in the npm registry, which a machine may not reach",
    ),
)


def unexcused(
    findings: Iterable[Finding], allowed: Iterable[Allowed] = EXCEPTIONS
) -> list[Finding]:
    """What no exception covers; where one is exceeded, everything that it covered is shown."""
    found = list(findings)
    sizes = _sizes(found)
    covered = {item.key for item in allowed if sizes[item.key] <= item.size}
    return [finding for finding in found if _key(finding) not in covered]


def outdated(findings: Iterable[Finding], allowed: Iterable[Allowed] = EXCEPTIONS) -> Iterator[str]:
    sizes = _sizes(findings)
    for item in allowed:
        size = sizes[item.key]
        if size < item.size:
            advice = f"lower it to {size}" if size else "remove it"
            yield f"{item.path} {item.where}: [{item.rule}] exception of {item.size}: {advice}"


def _sizes(findings: Iterable[Finding]) -> Counter[Key]:
    sizes: Counter[Key] = Counter()
    for finding in findings:
        sizes[_key(finding)] += finding.size
    return sizes


def _key(finding: Finding) -> Key:
    return finding.rule, finding.path, finding.where
