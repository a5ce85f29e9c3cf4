"""TRL's side of `benchmarks.step`, run by the Python of its own environment; it imports nothing of marl_jax.

Reads the work as JSON from standard input, prints the seconds of its steps as JSON on the last line.
"""

import itertools
import json
import os
import sys
import tempfile
import time

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import datasets
import tokenizers
import torch
import transformers
import trl

END, ROWS = 0, 64  # the end of a text; completions that are differentiated at a time


def main() -> None:
    work = json.load(sys.stdin)
    size, samples = work["model"]["vocab_size"], work["samples"]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(size)}, unk_token="0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0", pad_token="0")
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**{key: work["model"][key] for key in work["model"] if "dtype" not in key})
    )
    impose(model, work["lengths"])
    count = len(work["lengths"])
    rows = min(ROWS, count)
    with tempfile.TemporaryDirectory() as folder:
        settings = trl.GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=count // rows,
            num_generations=samples,
            max_completion_length=work["new"],
            generation_kwargs={"eos_token_id": None},
            learning_rate=work["learning_rate"],
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            shuffle_dataset=False,
            max_steps=work["steps"] + 1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        clock = Clock()
        trainer = trl.GRPOTrainer(
            model=model,
            args=settings,
            processing_class=tokenizer,
            reward_funcs=lambda completion_ids, **_: [
                sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids
            ],
            train_dataset=datasets.Dataset.from_list(
                [{"prompt": " ".join(map(str, prompt))} for prompt in work["prompts"]]
            ),
            callbacks=[clock],
        )
        with torch.random.fork_rng():
            trainer.train()
    print(json.dumps([after - before for before, after in itertools.pairwise(clock.ends)]))


def impose(model: transformers.Qwen3ForCausalLM, lengths: list[int]) -> None:
    """Make `generate` return completions of these lengths, each with END as its last token only."""
    generate, ends = model.generate, torch.tensor(lengths)

    class AtLength(transformers.StoppingCriteria):
        def __init__(self, prompt: int):
            self.prompt = prompt

        def __call__(self, input_ids, scores, **_):  # type: ignore[no-untyped-def]
            return input_ids.shape[1] - self.prompt >= ends

    def imposed(input_ids, **options):  # type: ignore[no-untyped-def]
        prompt = input_ids.shape[1]
        out = generate(
            input_ids=input_ids,
            stopping_criteria=transformers.StoppingCriteriaList([AtLength(prompt)]),
            **options,
        )
        completions = out[:, prompt:]
        completions[completions == END] = END + 1
        completions[torch.arange(completions.shape[1]) >= ends[:, None] - 1] = END
        return out

    model.generate = imposed


class Clock(transformers.TrainerCallback):
    """Records the times at which steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_, **__):  # type: ignore[no-untyped-def]
        self.ends.append(time.perf_counter())


if __name__ == "__main__":
    main()
