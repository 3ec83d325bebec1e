"""A model's tokenizer, from tokenizer.json or rebuilt from GGUF metadata. No torch.

Special tokens are always parsed as such when they stand in a text: whether a caller's text may
contain them is the caller's business. `encode(text, add_special_tokens=True)` puts bos (and eos)
where the model wants them; a rendered chat template carries its own, so encode that without.
"""

from __future__ import annotations

from tokenizers import Tokenizer

from engine.errors import ModelSourceError
from engine.models.gguf_file import read_header
from engine.models.source import ModelFiles
from engine.models.tokenizer_gguf import add_ends, tokenizer_from_gguf
from engine.models.tokenizer_settings import TokenizerSettings, load_tokenizer_settings

__all__ = ["TokenizerSettings", "load_tokenizer", "load_tokenizer_settings"]


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer of the model behind `files`; raises `ModelSourceError` where it has none."""
    if files.kind == "gguf":
        return tokenizer_from_gguf(read_header(files.weights[0]))
    path = files.folder / "tokenizer.json"
    if not path.is_file():
        raise ModelSourceError(
            f"The model folder {files.folder} has no tokenizer.json; download it too, or convert the model's"
            " tokenizer to that format."
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers package raises nothing narrower
        raise ModelSourceError(f"{path} is no readable tokenizer ({error}); download it again.") from error
    # Both are settings of training that some files carry along; a prompt must come out as it is.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = load_tokenizer_settings(files)
    if settings.add_bos and tokenizer.post_processor is None:
        add_ends(tokenizer, settings.bos_token, None)
    return tokenizer
