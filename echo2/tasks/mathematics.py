"""Mathematics with a verified answer: rows of a data set, scored by math-verify.

Guarantees: an answer is right if it equals the reference as mathematics (1/2 and 0.5, {1,2} and {2,1}), judged from the last
boxed expression or, failing that, what math-verify finds.
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from string import ascii_lowercase
from typing import Any

from echo2.base.errors import TaskError
from echo2.tasks.task import Prompt, Reward, TaskInstance, checked_index

TEXT_CHARS_MAX = 1 << 20  # as long as a completion may be in tokens; parsing is linear in it


@dataclass(frozen=True, slots=True)
class MathRow:
    """One problem: prompt, reference answer and origin. `where`: its file and row, for messages; no part of its content."""

    prompt: Prompt
    answer: str
    data_source: str = ""
    where: str = field(default="", repr=False, compare=False)


class MathTask:
    """Problems of `rows`. `name` names the data set in messages and metrics."""

    is_cheap = False

    def __init__(self, rows: Sequence[MathRow], name: str):
        if not rows:
            raise TaskError(f"math data set {name}: expected at least one row, got none")
        self._rows, self.name, self.size = rows, name, len(rows)

    @property
    def content(self) -> str:
        """A digest of all rows: what a run was begun with, by content."""
        digest = hashlib.sha256()
        for row in self._rows:
            digest.update(repr(row).encode())
        return digest.hexdigest()

    def where(self, index: int) -> str:
        return self._rows[index].where

    def sample(self, index: int) -> TaskInstance:
        row = self._rows[checked_index(index, self.size, self.name)]
        return TaskInstance(index, row.prompt, row.answer, {"data_source": row.data_source})

    def score(self, instance: TaskInstance, completion_text: str) -> Reward:
        if len(completion_text) > TEXT_CHARS_MAX:
            raise TaskError(f"{self.name}: expected at most {TEXT_CHARS_MAX} characters, got {len(completion_text)}")
        right = float(is_equal_answer(instance.answer, completion_text))
        return Reward(right, {"accuracy": right})


def is_equal_answer(reference: str, completion_text: str) -> bool:
    """Whether the completion's final answer equals the reference as mathematics."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise TaskError(f"math: the package math-verify is not installed ({error})") from error
    # math-verify's own time limits use SIGALRM, which only a main thread has; the reward pool has its own.
    final = _final(completion_text)
    if (bare := _bare(reference)) and bare == _bare(final):
        return True
    if not final.startswith("\\boxed"):
        if _LETTER.fullmatch(bare) and _CHOSEN.findall(final)[-1:] == [bare.strip("()")]:
            return True
        if _WORDS.fullmatch(bare) and bare.casefold() == (_SAID.findall(final) or [_bare(final)])[-1].casefold():
            return True
    if _DATE.fullmatch(bare):  # which the parser takes for a difference
        return _DATE.findall(final)[-1:] == [bare]
    parsed = parse(_plain(final), parsing_timeout=None)
    if (words := _words(bare)) and (said := [_words(text) for text in parsed if isinstance(text, str)]) and all(said):
        return words in said
    gold = _plain(reference)
    if not any(mark in gold for mark in ("$", "\\boxed", "\\[", "\\(")):
        gold = f"${gold}$"  # as the parser needs; data sets have both forms
    gold = parse(gold, parsing_timeout=None)
    if not gold:
        raise TaskError(f"math: expected a reference answer that can be parsed, got {reference[:80]!r}")
    return bool(parsed) and bool(verify(gold, parsed, timeout_seconds=None)) and not _differ_in_the_small(gold, parsed)


# A repeating decimal, in pieces of bounded length: in LaTeX, or 0.1(6), where that is the end, since 0.5(10) = 5 is a product.
_REPEATING = re.compile(
    r"(\d{0,30})\.(\d{0,30})(?:\\(?:overline|bar|dot)\s*\{?(\d{1,30})\}?|\((\d{1,30})\)(?=\s*(?:[$}.,;]|\\[)\]]|$)))"
)
# A choice's letter, and words, which the parser finds in boxes alone: "The answer is (B).", "**Answer:** yes", or nothing else.
_LETTER = re.compile(r"\(?[A-J]\)?")
_CHOSEN = re.compile(r"(?:(?i:answer|option|choice)(?: is)?[\s*:(>]+|\A[\s*(]*(?=[A-J][\s*).]*\Z))([A-J])\b")
_WORDS = re.compile(r"[^\W\d_]{2,40}(?: [^\W\d_]{1,40}){0,5}")
_SAID = re.compile(r"(?i:\banswer)(?: is)?[\s*:(>\"'`]+([^\W\d_]+(?: [^\W\d_]+)*)")
# Nothing but letters, which the parser takes for a product, by which `act` equals `cat`.
_PROSE = re.compile(r"(?:[^\W\d_]|[\s,;.'’&-])+")
# A product has few letters without vowels, or such as follow one another (ABCD).
_WORD = re.compile(r"[^\W\d_]{4,}|(?=\w{0,2}[aeiou])[^\W\d_]{3}")
_BETWEEN = re.compile(r"[,;&]|\band\b|\bor\b")  # answers are told in any order
_DATE = re.compile(r"\b\d{4}-\d{2}-\d{2}\b")
_GOES_ON = re.compile(r"(\d{0,30})\.(\d{0,9}?)(\d{1,9}?)\3{1,9}(?:\.\.\.|…|\\l?dots)")  # 0.1666...
_FRACTIONS = {  # Unicode's own
    "½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅖": (2, 5), "⅗": (3, 5), "⅘": (4, 5),
    "⅙": (1, 6), "⅚": (5, 6), "⅛": (1, 8), "⅜": (3, 8), "⅝": (5, 8), "⅞": (7, 8),
}  # fmt: skip
# What models write instead of TeX.
_SIGNS = {
    "−": "-", "∞": r"\infty ", "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ",
    "·": r"\cdot ", "°": r"^\circ ",
}  # fmt: skip
_POWERS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")  # superscripts
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"</?answer>"), " "),
    (re.compile(r"(?<!text\{)\b(true|false)\b", re.IGNORECASE), r"\\text{\1}"),
    (re.compile(r"\\varnothing"), r"\\emptyset"),
    (re.compile(r"(?<=\d)\.(?=\})"), ""),
    (re.compile(r"\\\$(?=\s*[\d.])|(?:[€£¥₹]|\b(?:USD|EUR|GBP))(?=\s*[\d.])|(?<=\d)\s*[€£¥₹]"), ""),
    (re.compile(r"\\dot\{(\d)\}(\d{0,28})\\dot\{(\d)\}"), r"\\overline{\1\2\3}"),
    (re.compile(r"(?<=\d) million\b"), r"\\times 10^6"),
    (re.compile(r"(?<=\d) billion\b"), r"\\times 10^9"),
    (re.compile(r"\\(?:text|mathrm)(?:bf)?\{\(?([A-E])[.)]{0,2}\}\\? .{1,200}(?=\}$)"), r"\\text{\1}"),
    (re.compile(r"(?<![\w)}\]])[–‒](?=\s*[\d.\\])"), "-"),
    (re.compile(r"√\s*\(([^()]{1,60})\)"), r"\\sqrt{\1}"),
    (re.compile(r"√\s*(\w{1,30})"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\w.])(\d{1,9}) (\d{1,9})/(\d{1,9})(?![\w.])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"(?<![\w.\\])(\d{1,30}(?:\.\d{1,30})?)[eE]([+-]?\d{1,3})(?!\w)"), r"\1\\times 10^{\2}"),
    (re.compile(r"(?<=\d)\s*(?:dollars?|euros?|cents?|km/h|m/s|km/s|kg/m\^3|g/cm\^3)(?![\w/])"), ""),
)
"""What the parser does not know, as what it knows: tags, truth, currencies, dashes, mixed numbers, powers of ten, units."""
_GROUPED = (
    re.compile(r"(?<![\w.,])\d{1,3}(?:(?:\\[,! ]|[ \u00a0\u2009\u202f])\d{3})+(?![\w])"),
    re.compile(r"(?<![\w.,])\d{1,3}(?:([._])\d{3})(?:\1\d{3})+(?![\w])"),
    re.compile(r"(?<![\w.,(\[])(?<!\\\{)\d{1,2}(?:,\d{2})+,\d{3}(?![\w,])"),
)
"""Numbers with thousands apart: by a space of any width or TeX's, twice at least by points or _, or as in India. So (3 100) is one
number, as the members of a pair are apart by a comma, but (1,23,456) is three."""
_SMALL = 1e-4  # below this, six decimal places, which are what math-verify compares, say little about a number


def _plain(text: str) -> str:
    """Writes what the parser does not know as what it knows: 0.\\overline{3} as a fraction, \\$18 and ١٨ as 18."""
    text = "".join(chr(ord(c) - 0xFEE0) if "！" <= c <= "～" else c for c in text)  # full width
    text = "".join(_SIGNS.get(c, str(unicodedata.decimal(c, c))) for c in text)
    text = re.sub(r"(?<=[\w)}])([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]{1,9})", lambda match: f"^{{{match[1].translate(_POWERS)}}}", text)
    for sign, (top, bottom) in _FRACTIONS.items():
        text = text.replace(sign, f"\\frac{{{top}}}{{{bottom}}}")
    for pattern, plain in _REWRITES:
        text = pattern.sub(plain, text)
    for pattern in _GROUPED:
        text = pattern.sub(lambda match: "".join(re.findall(r"\d", match[0])), text)
    return _REPEATING.sub(_as_fraction, _GOES_ON.sub(_as_fraction, text))


def _bare(text: str) -> str:
    """The words of an answer, without box, text marks and a last point: words mean what they say."""
    text = re.sub(r"^\\boxed\{(.{1,200})\}[$.\s]*$", r"\1", text.strip(" $"))
    return re.sub(r"^\\(?:text|mathrm|textbf)\{([^{}]{1,200})\}$", r"\1", text).rstrip(".").strip()


def _words(text: str) -> list[str]:
    """The answers in a text of words, in any order and without capitals; none if it may be a formula."""
    text = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]{1,200})\}", r"\1", _bare(text)).casefold()
    answers = sorted(" ".join(answer.split()) for answer in _BETWEEN.split(re.sub("['’]", "", text)))
    words = (word for answer in answers for word in _WORD.findall(answer))
    return answers if _PROSE.fullmatch(text) and any("".join(sorted(w)) not in ascii_lowercase for w in words) else []


def _as_fraction(match: re.Match[str]) -> str:
    whole, fixed, *repeated = match.groups()
    again = next(filter(None, repeated))
    top = int(whole + fixed + again) - int(whole + fixed or "0")
    return f"\\frac{{{top}}}{{{10 ** len(fixed) * (10 ** len(again) - 1)}}}"


def _differ_in_the_small(gold: Sequence[Any], parsed: Sequence[Any]) -> bool:
    """Whether both are small numbers that differ by more than a millionth of their size."""
    golds, founds = ([n for item in values if (n := _number(item)) is not None] for values in (gold, parsed))
    pairs = [(a, b) for a in golds for b in founds]
    if not pairs or any(max(abs(a), abs(b)) >= _SMALL for a, b in pairs):
        return False
    return not any(math.isclose(a, b, rel_tol=1e-6) for a, b in pairs)


def _number(parsed: Any) -> float | None:
    if not getattr(parsed, "is_number", False):
        return None
    try:
        return float(parsed)
    except (TypeError, ValueError, OverflowError):  # complex, a percentage that is left as it was written
        return None


def _final(completion_text: str) -> str:
    """Drops the text before the last box: the parser would take all boxes together, so a completion could list many answers."""
    text = completion_text.replace("\\fbox{", "\\boxed{")
    start = text.rfind("\\boxed")
    return text[start:] if start >= 0 else text
