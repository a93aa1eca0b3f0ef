"""A fault to plant: a text in one file, and what stands there instead."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        path: the file, from the root of the repository.
        old, new: the text, and what replaces it.
        what: what is wrong then, in a few words; names the fault.
        tests: what is run first, because it probably sees it: arguments of pytest. All tests follow if it does not.
        nth: which of several occurrences of `old`, from 0; None where there is one only.
        equivalent: why nothing can see it, if it was shown that nothing can.
    """

    path: str
    old: str
    new: str
    what: str
    tests: str = "tests/public/test_gradcheck.py -k of_a_feature"
    nth: int | None = None
    equivalent: str | None = None

    def plant(self, root: Path) -> None:
        """Write the faulty file under `root`.

        Raises:
            ValueError: the text is not there, or not as often as it must be.
        """
        file = root / self.path
        file.write_text(self.mutated(file.read_text(encoding="utf-8")), encoding="utf-8")

    def mutated(self, text: str) -> str:
        """The faulty text of the file."""
        parts = text.split(self.old)
        allowed = 2 if self.nth is None else self.nth + 2
        if len(parts) < allowed or (self.nth is None and len(parts) > 2):
            raise ValueError(f"{self.path}: got {len(parts) - 1} times {self.old!r} for '{self.what}', allowed is one")
        before, after = self.old.join(parts[: allowed - 1]), self.old.join(parts[allowed - 1 :])
        return before + self.new + after
