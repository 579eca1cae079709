"""A tiny Qwen3 with a character tokenizer, on disk in Hugging Face layout."""

from pathlib import Path

import torch

ALPHABET = "0123456789 ,:=+-abcdefghijklmnopqrstuvwxyz\n.?!()[]ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def make_tiny_model(
    folder: Path, seed: int = 0, hidden: int = 32, layers: int = 2, vocabulary: int | None = None
) -> Path:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = {text: number for number, text in enumerate(["<pad>", "<eos>", "<unk>", *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary or len(words), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=hidden // 4, max_position_embeddings=256,
        tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder
