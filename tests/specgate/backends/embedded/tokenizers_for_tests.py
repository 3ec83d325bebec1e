"""Small tokenizers of each kind, trained in milliseconds."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12:30, isn't it?",
    "def add(a, b):\n    return a + b\n",
    "今天天气很好，我们去公园散步吧。你好，世界！",
    "emoji 👩‍👩‍👧‍👦 🎉 and accents: naïve café, Привет",
]
SPECIALS = ["<|end|>", "<|start|>"]


def byte_level(vocab_size: int = 400) -> Tokenizer:
    """As GPT-2, Llama 3, Qwen and SmolLM2: characters stand for bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False), "naïve词"])
    return tokenizer


def sentencepiece(strip: bool = True) -> Tokenizer:
    """As Llama 2 and Mistral: "▁" for spaces, byte tokens for what the vocabulary lacks."""
    pieces = ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*"▁thequickbrownfxjmpsvlazydgTI'好你", "▁the", "▁fox"]
    vocab = {piece: place for place, piece in enumerate(dict.fromkeys(pieces))}
    model = models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    tokenizer.add_special_tokens(["<unk>", *SPECIALS])
    return tokenizer


def word_piece() -> Tokenizer:
    """A kind whose tokens have no fixed spelling: text depends on the neighbour."""
    words = ["[UNK]", "the", "fox", "jump", "##s", "##ed", "un", "##kind", ",", "."]
    vocab = {word: place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer
