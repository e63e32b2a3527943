"""The demo's prompt: a long text, cut to a number of tokens, and a question at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError

__all__ = ["build", "python_topics"]

_MARK = "\x01text\x01"


def python_topics() -> str:
    """The text that Python itself ships: its language reference, as ``help()`` shows it. Differs between versions."""
    from pydoc_data import topics

    return "\n\n".join(text for _, text in sorted(topics.topics.items()))


def build(tokenizer: Any, text: str, question: str, tokens: int) -> list[int]:
    """The token ids of a chat turn (or, without a chat template, of plain text): ``text``, then ``question``.

    Args:
        tokenizer: a Hugging Face tokenizer.
        text: the document.
        question: follows it.
        tokens: where the document ends, counted from the start of the prompt; a shorter text ends sooner.

    Returns:
        A few tokens more than ``tokens``: those of the question.

    Raises:
        ConfigError: for fewer tokens than the chat template takes, or an empty text.
    """
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": _MARK}]
        before, after = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True).split(_MARK)
        head = _encode(tokenizer, before)
    else:
        head, after = tokenizer.encode(""), "\nAnswer:"
    # Enough characters for any tokenizer, without encoding a whole book.
    body = _encode(tokenizer, text[: 16 * tokens])[: max(0, tokens - len(head))]
    if not body:
        raise ConfigError(
            f"{tokens} tokens leave no room for the text, of {len(text)} characters, after a head of {len(head)} tokens: "
            "give more --tokens, or a text that is not empty"
        )
    return [*head, *body, *_encode(tokenizer, f"\n\n{question}{after}")]


def _encode(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def read_text(path: Path) -> str:
    """A text file's content, decoded as UTF-8.

    Raises:
        ConfigError: where it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give the path of a text file") from error
