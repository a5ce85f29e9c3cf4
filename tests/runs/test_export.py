"""A policy that leaves a run computes what it computed in it: merged, as an adapter, in our reader and in others'."""

import dataclasses
import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import script
from safetensors.numpy import load_file
from stored_run import MODEL, TOKENIZER, make_base, make_run

from marl_jax.commands.export import export
from marl_jax.models import forward, init, load_hf
from marl_jax.models.lora import init_lora
from marl_jax.models.tokenizer import load_tokenizer
from marl_jax.run_folder.checkpoints import CheckpointError
from marl_jax.run_folder.folder import FolderError, digest_tokenizer, read_config
from marl_jax.runs.loading.parts import load_parts
from marl_jax.sampling import generate

RANK, ALPHA = 4, 6.0
ENDS = (TOKENIZER.convert_tokens_to_ids("<|im_end|>"),)  # a base that lists no end has that of its chats
FULL = init(1, MODEL)
PROMPTS = [TOKENIZER.encode(text) for text in ("12+30=?", "a longer text, so that rows differ")]
run_model = functools.partial(jax.jit, static_argnums=1)(forward)

SAMPLED = "It was sampled with temperature 1, top_p 1 and no top_k: send these with requests."


def adapter(seed):
    """One that changes what the model says."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: init_lora(0, MODEL, RANK, 1))
    return jax.tree.map(lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape[1:]), "float32"), shapes)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"), init(0, MODEL))


@pytest.fixture(scope="module")
def full(base, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("full"), base, {3: {"p1": FULL}, 5: {}}, scores={3: 1.0, 5: 0.0})


@pytest.fixture(scope="module")
def lora(base, tmp_path_factory):
    changes = {"policies__train": "lora", "policies__lora_rank": RANK, "policies__lora_alpha": ALPHA}
    return make_run(
        tmp_path_factory.mktemp("lora"), base, {3: {"p0": adapter(5), "p1": adapter(6)}}, **changes
    )


def played_by_adapter(seed, tokens):
    """Logits of the base under the adapter, as the run's engine and learner compute them."""
    stack = jax.tree.map(lambda leaf: leaf[None], adapter(seed))
    using = {
        "adapters": stack,
        "adapter_index": jnp.zeros(len(tokens), jnp.int32),
        "adapter_scale": ALPHA / RANK,
    }
    return run_model(init(0, MODEL), MODEL, jnp.array(tokens), **using)


def greedy(params, **using):
    done = generate(params, MODEL, PROMPTS, max_new_tokens=12, temperature=0, lanes=2, **using)
    return [completion.tokens for completion in done]


def test_a_full_policy_comes_back_to_the_bit_with_its_tokenizer(full, tmp_path):
    done = export(full, "p1", tmp_path, checkpoint="best")
    assert (done.roles, done.step, done.dtype) == (("aggregator",), 3, "float32")
    config, params = load_hf(tmp_path)
    assert config == dataclasses.replace(MODEL, eos_token_id=ENDS)
    jax.tree.map(np.testing.assert_array_equal, params, FULL)
    assert load_tokenizer(tmp_path, config).encode("1+1=?") == TOKENIZER.encode("1+1=?")


@pytest.mark.parametrize("trained, format", [("full", "hf"), ("lora", "hf"), ("lora", "peft")])
def test_an_export_has_the_tokenizer_of_its_base_and_modes_like_other_files(
    trained, format, base, tmp_path, request
):
    (tmp_path / "chat_template.jinja").write_text("of another export")
    (tmp_path / "vocab.json").write_text("of another export")
    umask = os.umask(0o027)
    try:
        export(request.getfixturevalue(trained), "p1", tmp_path, format=format, overwrite=True)
    finally:
        os.umask(umask)
    assert digest_tokenizer(tmp_path) == digest_tokenizer(base)
    said = "<|im_start|>user\n1+1=?<|im_end|>"
    assert load_tokenizer(tmp_path, MODEL).encode(said) == TOKENIZER.encode(said)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*.safetensors")} == {0o640}


def test_a_policy_may_start_from_an_export_beside_its_base(full, base, tmp_path):
    export(full, "p1", tmp_path / "out", checkpoint="best")
    run = make_run(tmp_path / "run", base, policies__bases=json.dumps({"p1": str(tmp_path / "out")}))
    parts = load_parts(read_config(run))
    jax.tree.map(np.testing.assert_array_equal, parts.start(0)["p1"], FULL)
    jax.tree.map(np.testing.assert_array_equal, parts.start(0)["p0"], init(0, MODEL))


def test_every_checkpoint_can_be_had(full, tmp_path):
    for which, step in (("latest", 5), ("best", 3), ("3", 3), ("base", 0)):
        assert export(full, "p1", tmp_path / which, checkpoint=which).step == step
    start, (_, latest) = init(0, MODEL), load_hf(tmp_path / "latest")
    jax.tree.map(np.testing.assert_array_equal, latest, start)
    jax.tree.map(np.testing.assert_array_equal, load_hf(tmp_path / "base")[1], start)


def test_a_frozen_policy_is_its_base(base, tmp_path):
    run = make_run(tmp_path / "run", base, {3: {"p0": FULL}}, policies__frozen_roles="aggregator")
    done = export(run, "p1", tmp_path / "out")
    assert (done.roles, done.step) == (("aggregator",), 3)
    jax.tree.map(np.testing.assert_array_equal, load_hf(tmp_path / "out")[1], load_hf(base)[1])


def test_an_export_ends_its_turns_elsewhere_as_it_did_here_and_is_sampled_like_its_base(tmp_path):
    """A base that never saw a chat ends texts alone, and other programs follow what its files say."""
    end = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    other = next(token for token in range(MODEL.vocab_size) if token != end)
    plain = dataclasses.replace(MODEL, eos_token_id=other)
    base = make_base(tmp_path / "base", init(0, plain), plain)
    (base / "generation_config.json").write_text(
        json.dumps({"eos_token_id": other, "temperature": 0.6, "top_k": 20, "max_new_tokens": 2048})
    )
    export(make_run(tmp_path / "run", base, {3: {"p0": FULL}}), "p0", tmp_path / "out")
    told = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (told["eos_token_id"], told["temperature"], told["top_k"]) == ([end, other], 0.6, 20)
    assert "max_new_tokens" not in told  # a server would cut every answer there
    assert load_hf(tmp_path / "out")[0].stop_tokens == (end, other)


@pytest.mark.parametrize("named", [False, True])
def test_an_export_says_how_a_server_is_asked(tmp_path, named):
    end = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    plain = dataclasses.replace(MODEL, eos_token_id=next(t for t in range(MODEL.vocab_size) if t != end))
    base = make_base(tmp_path / "base", init(0, plain), plain)
    switch = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    (base / "chat_template.jinja").write_text(TOKENIZER.chat_template + switch)
    if named:
        (base / "chat_template.jinja").rename(base / "default.jinja")
        settings = json.loads((base / "tokenizer_config.json").read_text())
        template = {"name": "default", "template": (base / "default.jinja").read_text()}
        settings["chat_template"] = [template, {"name": "tool_use", "template": "x"}]
        (base / "tokenizer_config.json").write_text(json.dumps(settings))
    lora = {"policies__train": "lora", "policies__lora_rank": RANK, "policies__lora_alpha": ALPHA}
    run = make_run(tmp_path / "run", base, {3: {"p0": adapter(5), "p1": adapter(6)}}, **lora)
    for format, ends in (("hf", False), ("peft", True)):
        note = export(run, "p0", tmp_path / format, format=format).note
        assert "enable_thinking" in note and (f"end with token {end}," in note) == ends


def test_tied_embeddings_stay_tied(tmp_path):
    tied = dataclasses.replace(MODEL, tie_word_embeddings=True)
    trained = init(1, tied)
    run = make_run(tmp_path / "run", make_base(tmp_path / "base", init(0, tied), tied), {3: {"p0": trained}})
    export(run, "p0", tmp_path / "out")
    config, params = load_hf(tmp_path / "out")
    assert config == dataclasses.replace(tied, eos_token_id=ENDS) and "lm_head" not in params
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, params, trained)


def test_weights_that_were_trained_in_float32_stay_so_unless_they_are_asked_for_rounded(tmp_path):
    half = dataclasses.replace(MODEL, dtype="bfloat16")
    base = make_base(
        tmp_path / "base", jax.tree.map(lambda leaf: leaf.astype("bfloat16"), init(0, MODEL)), half
    )
    run = make_run(tmp_path / "run", base, {3: {"p0": FULL}}, policies__dtype="float32")
    rounded = export(run, "p0", tmp_path / "a", dtype="bfloat16")
    assert str(rounded).endswith(
        f"\nThe weights are in float32 and are rounded to bfloat16, the given --dtype.\n{SAMPLED}"
    )
    config, params = load_hf(tmp_path / "a")
    assert config == dataclasses.replace(half, eos_token_id=ENDS)
    jax.tree.map(
        lambda ours, leaf: np.testing.assert_array_equal(ours, leaf.astype("bfloat16")), params, FULL
    )
    assert export(run, "p0", tmp_path / "b").dtype == "float32"
    jax.tree.map(np.testing.assert_array_equal, load_hf(tmp_path / "b")[1], FULL)
    start = export(run, "p0", tmp_path / "c", checkpoint="base")
    assert (start.dtype, start.note) == ("bfloat16", SAMPLED)  # nothing of it was ever more


def test_an_adapter_in_a_base_of_bfloat16_says_that_the_sum_is_rounded(tmp_path):
    half = dataclasses.replace(MODEL, dtype="bfloat16")
    weights = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), init(0, MODEL))
    base, low = make_base(tmp_path / "base", weights, half), {"policies__train": "lora"}
    low |= {"policies__lora_rank": RANK, "policies__lora_alpha": ALPHA}
    run = make_run(tmp_path / "run", base, {3: {"p0": adapter(5), "p1": adapter(6)}}, **low)
    done = export(run, "p1", tmp_path / "a")
    assert done.dtype == "bfloat16" and done.note.endswith(
        f"the sum is rounded to bfloat16, as the base is stored: --dtype=float32 keeps it exact.\n{SAMPLED}"
    )
    whole = export(run, "p1", tmp_path / "b", dtype="float32")
    assert (whole.dtype, whole.note) == ("float32", SAMPLED)


def test_what_started_from_a_base_of_float16_is_written_in_float32(tmp_path):
    base, stored = make_base(tmp_path / "base", init(0, MODEL)), tmp_path / "base" / "config.json"
    spelled = dict.fromkeys(("dtype", "torch_dtype"), "float16")
    stored.write_text(json.dumps(json.loads(stored.read_text()) | spelled))
    low = {"policies__train": "lora", "policies__lora_rank": RANK, "policies__lora_alpha": ALPHA}
    trees = {3: {"p0": adapter(5), "p1": adapter(6)}}
    run = make_run(tmp_path / "run", base, trees, policies__dtype="float32", **low)
    for checkpoint in ("3", "base"):
        done = export(run, "p1", tmp_path / f"of {checkpoint}", checkpoint=checkpoint)
        assert (done.dtype, done.note) == ("float32", SAMPLED)
    assert export(run, "p1", tmp_path / "rounded", dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize("format", ["hf", "peft"])
def test_files_of_a_model_are_not_replaced_unasked(lora, tmp_path, format):
    (tmp_path / "notes.txt").write_text("mine")
    export(lora, "p0", tmp_path, format=format)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(
        FolderError, match="which would be replaced: choose another --out, or replace it with --ov"
    ):
        export(lora, "p1", tmp_path, format=format)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    export(lora, "p1", tmp_path, format=format, overwrite=True)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after != before and after["notes.txt"] == b"mine"
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    with pytest.raises(FolderError, match=r"holds tokenizer\.json, which would be replaced"):
        export(lora, "p1", other, format=format)


def test_a_merged_adapter_computes_what_the_policy_computed(lora, tmp_path):
    export(lora, "p1", tmp_path)
    config, params = load_hf(tmp_path)
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (2, 24))
    expected = played_by_adapter(6, tokens)
    np.testing.assert_allclose(run_model(params, config, jnp.array(tokens)), expected, atol=1e-4, rtol=0)
    assert np.abs(expected - played_by_adapter(5, tokens)).max() > 0.1  # it is p1's, not p0's


def test_an_adapter_comes_back_to_the_bit_and_names_its_base(lora, base, tmp_path):
    done = export(lora, "p1", tmp_path, format="peft")
    assert (done.step, done.dtype) == (3, "float32")
    written, up = load_file(tmp_path / "adapter_model.safetensors"), adapter(6)["up"]
    for layer in range(MODEL.num_hidden_layers):
        stem = f"base_model.model.model.layers.{layer}.mlp.up_proj.lora"
        np.testing.assert_array_equal(written[f"{stem}_A.weight"], up["a"][layer].T)
        np.testing.assert_array_equal(written[f"{stem}_B.weight"], up["b"][layer].T)
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (about["lora_alpha"], about["base_model_name_or_path"]) == (ALPHA, str(base))
    assert load_tokenizer(tmp_path, MODEL).encode("1+1=?") == TOKENIZER.encode("1+1=?")


def test_what_cannot_be_exported_is_one_line(full, lora, base, tmp_path):
    adapter_there, file = tmp_path / "adapter", tmp_path / "file"
    export(lora, "p0", adapter_there, format="peft")
    file.touch()
    before = sorted(path.name for path in base.iterdir())
    for asked, message in (
        ((full, "p2", tmp_path), "--policy is 'p2', which is no policy of this run: did you mean"),
        ((full, "", tmp_path), "--policy is '', which is no policy of this run; there is: p0, p1"),
        ((full, "p0", ""), "--out is missing"),
        ((full, "p0", base), "is a base of the run: choose another --out"),
        *(
            ((full, "p0", place), f"belongs to the run in '{run}': choose another --out")
            for run in (full, lora)
            for place in (run, run / "checkpoints" / "3", run / "exported")
        ),
        ((full, "p0", adapter_there), "holds adapter_config.json, of another format than hf"),
        ((full, "p0", file), "cannot be used"),
        ((full, "p0", tmp_path, {"format": "gguf"}), "--format=gguf is unknown; there is: hf, peft"),
        ((full, "p0", tmp_path, {"dtype": "float16"}), "--dtype=float16 is unknown: did you mean 'bfloat16'"),
        (
            (full, "p0", tmp_path, {"format": "peft"}),
            "'p0' is trained in all its weights, so there is no adapter",
        ),
        ((full, "p0", tmp_path, {"checkpoint": "4"}), "there is no checkpoint of step 4"),
        ((tmp_path, "p0", tmp_path / "out"), "there is no run in"),
    ):
        *asked, flags = (*asked, {}) if len(asked) == 3 else asked
        with pytest.raises((FolderError, CheckpointError)) as refusal:
            export(*asked, **flags)
        assert message in str(refusal.value) and "\n" not in str(refusal.value), message
    assert sorted(path.name for path in base.iterdir()) == before


def test_an_adapter_is_not_summed_into_another_base(lora, base, tmp_path):
    begun = json.loads((lora / "config.json").read_text())
    digests = {
        name: "0" * 64 if name.startswith("base") else value for name, value in begun["digests"].items()
    }
    try:
        (lora / "config.json").write_text(json.dumps({**begun, "digests": digests}))
        with pytest.raises(FolderError, match="is no longer there"):
            export(lora, "p0", tmp_path)
        export(lora, "p0", tmp_path, accept_changes=True)
    finally:
        (lora / "config.json").write_text(json.dumps(begun))


def test_the_script_says_what_it_wrote(full, tmp_path, capsys):
    flags = [f"--workdir={full}", "--policy=p1", f"--out={tmp_path}", "--checkpoint=3"]
    assert script.run("experiments.export", *flags) == 0
    where = f"policy p1 (aggregator) after step 3, hf, float32: {tmp_path}"
    assert capsys.readouterr().out == f"{where}\n{SAMPLED}\n"


# ---------------------------------------------------------------- other libraries


def theirs(model, tokens):
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def their_greedy(model, prompt):
    """As they generate, without any stop."""
    import torch

    tokens = torch.tensor([prompt])
    for _ in range(12):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parity
@pytest.mark.parametrize("trained, format", [("full", "hf"), ("lora", "hf"), ("lora", "peft")])
def test_transformers_and_peft_compute_what_the_policy_computed(request, base, tmp_path, trained, format):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export(request.getfixturevalue(trained), "p1", tmp_path, checkpoint="3", format=format)
    model = AutoModelForCausalLM.from_pretrained(base if format == "peft" else tmp_path)
    if format == "peft":
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, tmp_path)
    model = model.eval()
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (2, 24))
    if trained == "full":
        expected, said = run_model(FULL, MODEL, jnp.array(tokens)), greedy(FULL)
    else:
        expected = played_by_adapter(6, tokens)
        stack = jax.tree.map(lambda leaf: leaf[None], adapter(6))
        using = {"adapters": stack, "adapter_index": [0, 0], "adapter_scale": ALPHA / RANK}
        said = greedy(init(0, MODEL), **using)
    np.testing.assert_allclose(theirs(model, tokens), expected, atol=2e-4, rtol=0)
    assert [their_greedy(model, prompt) for prompt in PROMPTS] == said
    assert AutoTokenizer.from_pretrained(tmp_path).encode("12+30=?") == PROMPTS[0]
