"""Tokenizers: those of published models, loaded from their directories, and a small one for the micro models.

Both are transformers tokenizers with a chat template, saved in the same format, so that everything after
`load_tokenizer` treats both alike. Text becomes token ids only here.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marl_jax.models.model_config import ModelConfig
from marl_jax.packaged import resolve_path

FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
)
# {`tokenizer_class` of a directory: class}, for the names that `save_pretrained` writes and those of published Qwen3.
CLASSES = {
    **dict.fromkeys(("TokenizersBackend", "PreTrainedTokenizerFast"), "PreTrainedTokenizerFast"),
    **dict.fromkeys(("Qwen2Tokenizer", "Qwen2TokenizerFast"), "Qwen2TokenizerFast"),
}
PAD, START, END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"
# Words of the micro models' conversations that are one token; everything else is spelled in characters.
WORDS = (
    *("system", "user", "assistant", "\\boxed", "Correct", "Incorrect", "STRATEGY", "candidate", "Candidate"),
    *("answer", "Answer", "question", "solution", "```", "python", "def ", "return ", "print", "input"),
    *("for ", "    "),
)
# Ids (or a tenth of all, if that is more) that a model may have beyond its tokenizer's, as padding to a round number.
SPARE = 256
CHARACTERS = "\n\t" + "".join(map(chr, range(32, 127)))
# Like Qwen3's own template, but without the empty thought that opens a turn there when thinking is off.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def load_tokenizer(directory: str | os.PathLike[str], config: ModelConfig | None = None) -> Any:
    """The tokenizer of a local directory; with `config`, a tokenizer with ids that the model lacks is refused."""
    directory = resolve_path(directory)
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise FileNotFoundError(f"{directory} has no tokenizer.json; is this the directory of a model?")
    try:
        tokenizer = _class_of(directory).from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # a parser of a broken file may raise anything
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"the tokenizer in {directory} cannot be read: {reason}") from error
    if config is not None:
        check_vocabulary(tokenizer, config)
    return tokenizer


def _class_of(directory: Path) -> Any:
    """The class that `AutoTokenizer` would use for a Qwen3 model, imported by its name if that is known.

    `AutoTokenizer` imports the configurations of all models, and with them PyTorch if it is installed: 2 s.
    """
    import transformers

    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    name = "" if "auto_map" in settings else str(settings.get("tokenizer_class"))
    return getattr(transformers, CLASSES.get(name, "AutoTokenizer"))


def save_tokenizer(directory: str | os.PathLike[str], tokenizer: Any) -> None:
    """Write the files that `load_tokenizer` reads. `tokenizer` may be a directory, whose files are copied unchanged."""
    if not isinstance(tokenizer, str | os.PathLike):
        tokenizer.save_pretrained(str(directory))
        return
    files = tokenizer_files(tokenizer)
    for stale_name in {path.name for path in tokenizer_files(directory)} - {path.name for path in files}:
        (Path(directory) / stale_name).unlink()
    for path in files:
        shutil.copyfile(path, Path(directory) / path.name)


def tokenizer_files(directory: str | os.PathLike[str]) -> list[Path]:
    """The files that decide how text becomes tokens, including the chat template."""
    return sorted(path for path in resolve_path(directory).iterdir() if path.name in FILES and path.is_file())


def check_vocabulary(tokenizer: Any, config: ModelConfig) -> None:
    """Refuse a tokenizer with ids outside the model's vocabulary, and one that leaves too much of it unused."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= config.vocab_size:
        raise ValueError(
            f"the tokenizer has token id {largest} but the model's vocab_size is {config.vocab_size}; "
            "they do not belong together"
        )
    spare = config.vocab_size - largest - 1
    if spare > max(SPARE, config.vocab_size // 10):
        raise ValueError(
            f"the tokenizer's largest token id is {largest} and the model's vocab_size {config.vocab_size}: {spare} "
            "unused ids are more than padding; they do not belong together"
        )


def build_micro_tokenizer(words: Sequence[str] = WORDS, characters: str = CHARACTERS) -> Any:
    """A tokenizer of single characters and a few words; ids are ordered: specials, words, characters.

    Text over `characters` survives encoding and decoding exactly; any other character becomes <|unknown|>.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = (PAD, START, END, UNKNOWN)
    entries = (*specials, *words, *characters)
    if len(set(entries)) < len(entries):
        raise ValueError("a word or character is listed twice; each may have one token id")
    vocabulary = {entry: i for i, entry in enumerate(entries)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in specials])
    inner.add_tokens([AddedToken(word, normalized=False) for word in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=ModelConfig.preset("xs").max_position_embeddings,
    )
