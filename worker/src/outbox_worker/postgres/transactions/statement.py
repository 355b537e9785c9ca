"""PURE: just enough of SQL's lexical rules to tell statements apart and read their first words.

Comments, quoted strings and names, and dollar quotes may hold anything; nothing inside them counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

# Everything beyond ASCII is a letter to PostgreSQL. Named as a range, it takes `re` 20 ms at each start.
_WORD: Final = re.compile(r"(?:[A-Za-z_]|[^\x00-\x7f])(?:[\w$]|[^\x00-\x7f])*", re.ASCII)
_DOLLAR: Final = re.compile(r"\$(?:(?:[A-Za-z_]|[^\x00-\x7f])(?:\w|[^\x00-\x7f])*)?\$", re.ASCII)
_ENDS: Final = frozenset({"COMMIT", "END", "ROLLBACK", "ABORT"})
_QUERIES: Final = frozenset({"WITH", "INSERT", "UPDATE", "DELETE", "MERGE", "SELECT", "VALUES", "TABLE"})


class StatementError(ValueError):
    """The text is not what was asked for; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Token:
    """A word, a semicolon, or anything else (a string, an operator), from `start` to before `end`."""

    text: str
    start: int
    end: int
    is_word: bool = False


def tokenize(text: str) -> Iterator[Token]:
    """Yield the tokens; comments and blanks are left out."""
    place = 0
    while place < len(text):
        if text[place].isspace():
            place += 1
        elif text.startswith("--", place):
            newline = text.find("\n", place)
            place = len(text) if newline < 0 else newline + 1
        elif text.startswith("/*", place):
            place = _comment_end(text, place)
        else:
            token = _token(text, place)
            yield token
            place = token.end


def _token(text: str, place: int) -> Token:
    if word := _WORD.match(text, place):
        if word.group().upper() == "E" and text.startswith("'", word.end()):
            end = _quote_end(text, word.end(), backslash=True)
            return Token(text[place:end], place, end)
        return Token(word.group(), place, word.end(), is_word=True)
    if text[place] in "'\"":
        end = _quote_end(text, place, backslash=False)
    elif dollar := _DOLLAR.match(text, place):
        closing = text.find(dollar.group(), dollar.end())
        end = len(text) if closing < 0 else closing + len(dollar.group())
    else:
        end = place + 1
    return Token(text[place:end], place, end)


def _quote_end(text: str, place: int, *, backslash: bool) -> int:
    quote = text[place]
    place += 1
    while place < len(text):
        if backslash and text[place] == "\\":
            place += 2
        elif text[place] != quote:
            place += 1
        elif text.startswith(quote, place + 1):
            place += 2
        else:
            return place + 1
    return len(text)


def _comment_end(text: str, place: int) -> int:
    depth = 0
    while place < len(text):
        if text.startswith("/*", place):
            depth, place = depth + 1, place + 2
        elif text.startswith("*/", place):
            depth, place = depth - 1, place + 2
            if depth == 0:
                return place
        else:
            place += 1
    return len(text)


def split_statements(text: str) -> list[list[Token]]:
    """Return each statement's tokens, without the semicolons; empty statements are left out."""
    statements: list[list[Token]] = [[]]
    for token in tokenize(text):
        if token.text == ";":
            statements.append([])
        else:
            statements[-1].append(token)
    return [each for each in statements if each]


def find_transaction_end(text: str) -> str | None:
    """Return the first command that would end the transaction, None when there is none.

    A body in `BEGIN ATOMIC … END` is not understood, and passes.
    """
    statements = split_statements(text)
    if any("ATOMIC" in (token.text.upper() for token in each) for each in statements):
        return None
    for each in statements:
        words = [token.text.upper() for token in each[:4] if token.is_word]
        if words and words[0] in _ENDS and not (words[0] == "ROLLBACK" and "TO" in words[1:3]):
            return words[0]
        if words[:2] == ["PREPARE", "TRANSACTION"]:
            return "PREPARE TRANSACTION"
    return None


@dataclass(frozen=True, slots=True)
class BatchStatement:
    """A user's statement, ready to get the relation `batch`: `head`, the SELECT, `joint`, `body`.

    `offset` is where `body` starts in the user's text.
    """

    head: str
    joint: str
    body: str
    offset: int


def parse_batch_statement(text: str) -> BatchStatement:
    """Find the place for `WITH batch AS (…)` in a user's statement, or in the WITH list it already has.

    Raises:
        StatementError: it is not exactly one statement that can have a WITH list.

    """
    statements = split_statements(text)
    if len(statements) != 1:
        raise StatementError(
            f"it holds {len(statements)} statements, but exactly one is run for a batch; join them in one WITH list"
        )
    tokens = statements[0]
    first = tokens[0].text.upper()
    if first not in _QUERIES and tokens[0].text != "(":
        raise StatementError(f"it begins with {first}; it must be INSERT, UPDATE, DELETE, MERGE, SELECT or WITH")
    end = tokens[-1].end
    if first != "WITH":
        start = tokens[0].start
        return BatchStatement("WITH batch AS (", ") ", text[start:end], start)
    recursive = len(tokens) > 1 and tokens[1].text.upper() == "RECURSIVE"
    start = tokens[1].end if recursive else tokens[0].end
    return BatchStatement(
        "WITH RECURSIVE batch AS (" if recursive else "WITH batch AS (", "), ", text[start:end], start
    )
