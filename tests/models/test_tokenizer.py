"""Tokenizers: the micro one survives every character, and both kinds take the same road."""

import dataclasses
import functools
import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from marl_jax.models import ModelConfig
from marl_jax.models.tokenizer import (
    CHARACTERS,
    CLASSES,
    WORDS,
    build_micro_tokenizer,
    check_vocabulary,
    load_tokenizer,
    save_tokenizer,
)

PROGRAM = (
    "def f(x):\n\tif x % 2 == 0:\n        return {'a': [x ** 2, ~x]}\n    print(f\"{x!r}\")  # \\boxed{1}\n"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """As a user meets it: saved, then loaded."""
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory, build_micro_tokenizer())
    return load_tokenizer(directory)


def test_it_fits_the_micro_models(tokenizer):
    config = ModelConfig.preset("xs")
    assert len(tokenizer) <= config.vocab_size == 160
    check_vocabulary(tokenizer, config)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (config.eos_token_id, config.pad_token_id)


@pytest.mark.parametrize(
    "text", [CHARACTERS, PROGRAM, " a  b   c ", "don't , stop .", "", "Incorrectness", *WORDS]
)
def test_text_survives_encoding_and_decoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("word", WORDS)
def test_whole_words_are_one_token(tokenizer, word):
    assert len(tokenizer.encode(word)) == 1


def test_loading_changes_no_token(tokenizer):
    assert tokenizer.encode(PROGRAM) == build_micro_tokenizer().encode(PROGRAM)


def test_what_it_cannot_spell_is_one_unknown_token(tokenizer):
    assert tokenizer.decode(tokenizer.encode("é+1")) == "<|unknown|>+1"


MESSAGES = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": "1+1?"},
]


def test_the_template_renders_a_conversation(tokenizer):
    expected = "<|im_start|>system\nAnswer.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
    render = functools.partial(tokenizer.apply_chat_template, MESSAGES, tokenize=False)
    assert render() == expected
    assert render(add_generation_prompt=True) == expected + "<|im_start|>assistant\n"


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    save_tokenizer(tmp_path, build_micro_tokenizer())
    small = dataclasses.replace(ModelConfig.preset("xs"), vocab_size=100)
    with pytest.raises(ValueError, match=r"has token id 121 but the model's vocab_size is 100"):
        load_tokenizer(tmp_path, small)


@pytest.mark.parametrize(
    ("largest", "vocabulary"), [(121, 160), (121, 122 + 256), (151668, 151936), (100014, 102400)]
)
def test_a_model_may_have_ids_to_spare_for_padding_and_no_more(largest, vocabulary):
    class Some:
        get_vocab = staticmethod(lambda: {"a": 0, "b": largest})

    def model(size):
        return dataclasses.replace(ModelConfig.preset("xs"), vocab_size=size)

    check_vocabulary(Some, model(vocabulary))
    with pytest.raises(ValueError, match=rf"{40 * largest - largest - 1} unused ids are more than padding"):
        check_vocabulary(Some, model(40 * largest))


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", [*CLASSES, None])
def test_a_class_that_is_known_by_name_is_the_one_that_transformers_takes(name, tmp_path):
    inner = Tokenizer(models.BPE(dict(zip(sorted(pre_tokenizers.ByteLevel.alphabet()), range(256))), []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|im_end|>"])
    template = build_micro_tokenizer().chat_template
    save_tokenizer(tmp_path, PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template))
    (tmp_path / "config.json").write_text(json.dumps(ModelConfig.preset("xs").to_hf()))
    about = tmp_path / "tokenizer_config.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"tokenizer_class": name}))
    found, usual = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
    assert type(found) is type(usual) and repr(found) == repr(usual)
    assert found.backend_tokenizer.to_str() == usual.backend_tokenizer.to_str()
    assert found.encode("12 + é<|im_end|>") == usual.encode("12 + é<|im_end|>")
    assert found.chat_template == usual.chat_template is not None


def test_a_broken_tokenizer_is_refused_in_one_line(tmp_path):
    save_tokenizer(tmp_path, build_micro_tokenizer())
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"^the tokenizer in [^\n]* cannot be read: [^\n]*$"):
        load_tokenizer(tmp_path)


def test_a_word_listed_twice_is_refused():
    with pytest.raises(ValueError, match="listed twice"):
        build_micro_tokenizer(words=("a",))
