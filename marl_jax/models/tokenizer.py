"""Tokenizers: those of published models from their directory, and a small one for the micro models.

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
from marl_jax.packaged import located

FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
)
# By the name that a directory gives: what `save_pretrained` writes, and what Qwen3 is published with.
CLASSES = {
    **dict.fromkeys(("TokenizersBackend", "PreTrainedTokenizerFast"), "PreTrainedTokenizerFast"),
    **dict.fromkeys(("Qwen2Tokenizer", "Qwen2TokenizerFast"), "Qwen2TokenizerFast"),
}
PAD, START, END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"
# Whole words of the conversations that micro models have; everything else is spelled out.
WORDS = (
    "system",
    "user",
    "assistant",
    "\\boxed",
    "Correct",
    "Incorrect",
    "STRATEGY",
    "candidate",
    "Candidate",
    "answer",
    "Answer",
    "question",
    "solution",
    "```",
    "python",
    "def ",
    "return ",
    "print",
    "input",
    "for ",
    "    ",
)
# How many ids, or a tenth of all if that is more, a model may have beyond its tokenizer's: padding to a round number.
SPARE = 256
CHARACTERS = "\n\t" + "".join(map(chr, range(32, 127)))
# The form of Qwen3's own template, without the empty thought that there opens a turn when thinking is off.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def load_tokenizer(directory: str | os.PathLike[str], config: ModelConfig | None = None) -> Any:
    """The tokenizer of a local directory; with `config`, one with ids that the model lacks is refused."""
    directory = located(directory)
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise FileNotFoundError(f"{directory} has no tokenizer.json; is this the directory of a model?")
    try:
        tokenizer = _class_of(directory).from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # whatever the parser of the broken file raised
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"the tokenizer in {directory} cannot be read: {reason}") from error
    if config is not None:
        check_vocabulary(tokenizer, config)
    return tokenizer


def _class_of(directory: Path) -> Any:
    """What `AutoTokenizer` takes for a Qwen3 model, imported by its name where that is known.

    `AutoTokenizer` imports the configurations of all models, and with them PyTorch where that is installed: 2 s.
    """
    import transformers

    settings = directory / "tokenizer_config.json"
    about = json.loads(settings.read_text("utf-8")) if settings.is_file() else {}
    name = "" if "auto_map" in about else str(about.get("tokenizer_class"))
    return getattr(transformers, CLASSES.get(name, "AutoTokenizer"))


def save_tokenizer(directory: str | os.PathLike[str], tokenizer: Any) -> None:
    """Write the files that `load_tokenizer` reads. `tokenizer` may be a directory, whose files are copied unchanged."""
    if not isinstance(tokenizer, str | os.PathLike):
        tokenizer.save_pretrained(str(directory))
        return
    files = tokenizer_files(tokenizer)
    for stale in {path.name for path in tokenizer_files(directory)} - {path.name for path in files}:
        (Path(directory) / stale).unlink()
    for path in files:
        shutil.copyfile(path, Path(directory) / path.name)


def tokenizer_files(directory: str | os.PathLike[str]) -> list[Path]:
    """All that decides how text becomes tokens, the chat template included."""
    return sorted(path for path in located(directory).iterdir() if path.name in FILES and path.is_file())


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
            "ids to spare are more than padding; they do not belong together"
        )


def build_micro_tokenizer(words: Sequence[str] = WORDS, characters: str = CHARACTERS) -> Any:
    """A tokenizer of single characters and a few whole words; ids: specials, words, characters.

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
