"""Chats token for token, over the templates of ten model families."""

from __future__ import annotations

import random
from typing import Any

import pytest

from echo2.base.errors import ConfigError
from echo2.tasks.runtime.chat_format import ChatFormat, ChatOptions
from tests.unit.tasks.families import FAMILIES, Family, tokenizer_of

WORDS = ["the", "abc", "er in", "12 12", "tab", "x", "thein", "é?", "a\nb", "Hi."]
Chat = list[dict[str, Any]]


def said(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 4)))


def grown(family: Family, rng: random.Random, is_canonical: bool) -> tuple[Chat, list[int], list[tuple[int, ...]]]:
    """One path through a random tree of a session: its messages, its tokens, and each prompt with what was sampled on it."""
    tokenizer = tokenizer_of(family.name)
    chat_format = ChatFormat(tokenizer)
    chat: Chat = [{"role": "system", "content": said(rng)}] if rng.random() < 0.5 else []
    chat.append({"role": "user", "content": said(rng)})
    tokens = chat_format.opening(chat)
    known: list[tuple[int, ...]] = []
    for _ in range(rng.randint(1, 4)):
        text = said(rng)
        sampled = tokenizer.encode(text, add_special_tokens=False)
        if not is_canonical:  # as models sample: pieces that no tokenizer would give for that text
            sampled = [tokenizer.convert_tokens_to_ids(c) for c in rng.choices("abcther12", k=rng.randint(1, 9))]
            text = tokenizer.decode(sampled)
        if family.closing and (is_canonical or rng.random() < 0.7):
            sampled.append(tokenizer.convert_tokens_to_ids(family.closing))
        known.append((*tokens, *sampled))
        tools = rng.random() < 0.4
        fresh = [
            {"role": "tool" if tools else "user", "content": said(rng)}
            for _ in range(rng.randint(1, 2) if tools else 1)
        ]
        chat += [{"role": "assistant", "content": text}, *fresh]
        tokens = [*known[-1], *chat_format.between(fresh, sampled)]
    return chat, tokens, known


def check_tree(family: Family, seed: int) -> None:
    rng = random.Random(seed)
    is_canonical = rng.random() < 0.5
    chat, tokens, known = grown(family, rng, is_canonical)
    tokenizer = tokenizer_of(family.name)
    for prompt in known:
        assert tuple(tokens[: len(prompt)]) == prompt, (
            f"{family.name} {seed}: the next prompt begins with what was sampled"
        )
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    for message in chat:
        assert message["content"].strip() in text or message["role"] == "assistant", (
            f"{family.name} {seed}: {message} is lost"
        )
    if family.closing:
        assert family.closing * 2 not in text and text.count(family.closing) >= len(known), (
            f"{family.name} {seed}: {text}"
        )
    is_plain = is_canonical and all(
        (m["role"] != "tool" or family.knows_tools) and (m["role"] != "system" or family.knows_system) for m in chat
    )
    if is_plain and not (
        family.name == "mistral" and chat[0]["role"] == "system"
    ):  # it moves the system's words each turn
        whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert _plain(text) == _plain(whole), f"{family.name} {seed}: the template writes it so"


def _plain(text: str) -> str:
    """But for the blanks that a metaspace tokenizer puts before a word after a special token."""
    return "".join(text.split())


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_next_prompt_begins_with_prompt_and_sampled_ids_and_reads_as_the_template_writes(name: str) -> None:
    for seed in range(40):
        check_tree(FAMILIES[name], seed)


@pytest.mark.soak
def test_ten_thousand_random_trees_over_all_families() -> None:
    for seed in range(10_000 // len(FAMILIES)):
        for family in FAMILIES.values():
            check_tree(family, 1000 + seed)


def test_text_prompts_are_chats_where_the_model_has_a_template_unless_they_are_to_stay_plain() -> None:
    tokenizer = tokenizer_of("qwen3")
    options = ChatOptions("Be brief.", {"enable_thinking": False})
    text = tokenizer.decode(ChatFormat(tokenizer, options).prompt("1+1?"))
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    plain = ChatFormat(tokenizer, ChatOptions(is_plain=True))
    assert tokenizer.decode(plain.prompt("1+1?")) == "1+1?"
    assert tokenizer.decode(plain.between([{"role": "user", "content": "so?"}], [])) == "\nso?\n"


def test_a_refused_system_message_is_said_by_the_first_user_message() -> None:
    gemma = tokenizer_of("gemma")
    text = gemma.decode(ChatFormat(gemma, ChatOptions("Be brief.")).prompt("Hi."))
    assert "<start_of_turn>user" in text and text.index("Be brief.") < text.index("Hi.") and "system" not in text


def test_a_template_that_loses_what_is_said_is_an_error() -> None:
    tokenizer = tokenizer_of("zephyr")
    broken = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>")
    broken.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ConfigError, match="chat template: expected one that takes the roles user, assistant"):
        ChatFormat(broken).between([{"role": "user", "content": "again"}], [5])
