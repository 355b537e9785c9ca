"""Signatures of questions and answers."""

from __future__ import annotations

import pytest

from outbox_core.proof import is_same, sign_answer, sign_question

KEY = b"key"
ASKED = ("uid", "nonce", "POST", "/intent", b"body")
OTHERS = [
    pytest.param(("other", *ASKED[1:]), id="another pod"),
    pytest.param(("uid", "other", *ASKED[2:]), id="another nonce"),
    pytest.param(("uid", "nonce", "GET", *ASKED[3:]), id="another method"),
    pytest.param(("uid", "nonce", "POST", "/status", b"body"), id="another path"),
    pytest.param(("uid", "nonce", "POST", "/intent", b"bodies"), id="another body"),
    pytest.param(("uidn", "once", *ASKED[2:]), id="the same bytes, divided otherwise"),
]


@pytest.mark.parametrize("other", OTHERS)
def test_a_signature_is_of_one_question(other: tuple[str, str, str, str, bytes]):
    assert not is_same(sign_question(KEY, *ASKED), sign_question(KEY, *other))


def test_a_signature_is_of_one_key():
    assert not is_same(sign_question(KEY, *ASKED), sign_question(b"other", *ASKED))
    question = sign_question(KEY, *ASKED)
    assert not is_same(sign_answer(KEY, question, b""), sign_answer(b"other", question, b""))


def test_an_answer_is_of_one_question_and_of_one_text():
    question, other = sign_question(KEY, *ASKED), sign_question(KEY, "other", *ASKED[1:])
    answer = sign_answer(KEY, question, b"text")
    assert is_same(answer, sign_answer(KEY, question, b"text"))
    assert not is_same(answer, sign_answer(KEY, other, b"text"))
    assert not is_same(answer, sign_answer(KEY, question, b"texts"))
    assert not is_same(answer, question)


def test_a_header_may_hold_anything():
    assert not is_same("\udce4ö", sign_question(KEY, *ASKED))
