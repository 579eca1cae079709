"""Chat templates of model families with small tokenizers: in shape those that the families publish, cut to what they do."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% set content = m.content.split('</think>')[-1].lstrip('\n') %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ content }}<|im_end|>\n"
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0].content %}"
    "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}{{ bos_token }}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST]{% if loop.last and system %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant roles') }}{% endif %}{% endfor %}"
)
_GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_PHI3 = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
_DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% set ns = namespace(tool=false) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.tool = false %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' %}{% if not ns.tool %}<｜Assistant｜>{% endif %}{% set ns.tool = false %}"
    "{{ m.content.split('</think>')[-1] }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}{% if not ns.tool %}<｜tool▁outputs▁begin｜>{% endif %}{% set ns.tool = true %}"
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<｜tool▁outputs▁end｜>{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.tool %}<｜Assistant｜>{% endif %}"
)
_ZEPHYR = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_GLM4 = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_GRANITE = (
    "{% for m in messages %}<|start_of_role|>{{ 'tool_response' if m.role == 'tool' else m.role }}<|end_of_role|>"
    "{{ m.content }}<|end_of_text|>\n{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """`closing`: with which the model ends its turn; empty: with the mark of the next role."""

    name: str
    template: str
    special: tuple[str, ...]
    closing: str
    kind: str = "byte"  # byte | metaspace: how its tokenizer writes text
    knows_tools: bool = True
    knows_system: bool = True
    bos: str = "<s>"


_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
FAMILIES = {
    one.name: one
    for one in (
        Family("qwen2.5", _CHATML, _IM, "<|im_end|>"),
        Family("qwen3", _QWEN3, _IM, "<|im_end|>"),
        Family("llama3", _LLAMA3, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
               "<|eot_id|>", bos="<|begin_of_text|>"),
        Family("mistral", _MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", "metaspace", False),
        Family("gemma", _GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", "metaspace", False,
               False, "<bos>"),
        Family("phi3", _PHI3, ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|end|>", "metaspace", False),
        Family("deepseek_r1", _DEEPSEEK, ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
               "<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>"),
        Family("zephyr", _ZEPHYR, ("<s>", "</s>"), "</s>", "metaspace", False),
        Family("glm4", _GLM4, ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"), ""),
        Family("granite3", _GRANITE, ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"), "<|end_of_text|>"),
    )
}  # fmt: skip
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


@lru_cache(maxsize=32)
def tokenizer_of(name: str) -> Any:
    """A small one that merges pairs of letters, so that text encoded again would often come out as other tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    family = FAMILIES[name]
    merges = [("a", "b"), ("ab", "c"), ("t", "h"), ("th", "e"), ("e", "r"), ("i", "n"), ("1", "2")]
    if family.kind == "byte":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = [*alphabet, *("".join(pair) for pair in merges)]
        made = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
    else:
        merges = [*merges, ("▁", "t"), ("▁", "a")]
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        words = ["<unk>", *bytes_, *_LETTERS, "▁", *"?!.,:\n", *("".join(pair) for pair in merges)]
        vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
        made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in family.special])
    closing = family.closing or family.special[-1]
    bos = family.bos if family.bos in family.special else closing
    names = {"eos_token": closing, "bos_token": bos}
    found = PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, **names)
    found.chat_template = family.template
    return found
