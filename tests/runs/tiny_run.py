"""A run so small that it takes seconds: a model of random weights that is paid for small letters.

python tiny_run.py BASE WORKDIR [--kind=KIND] [--signal=SIGTERM] [--at=PLACE] [--visit=N] [--after=SECONDS] [--stuck=S]

The process gets the signal so many seconds after it comes to a place for the Nth time, and prints when that is. Stuck,
its main thread heeds nothing for S seconds.
"""

import argparse
import dataclasses
import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax

from marl_jax import policies
from marl_jax.config.phase_fields import Phase
from marl_jax.config.run_config import (
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    LogConfig,
    MeshConfig,
    PoliciesConfig,
    RolloutConfig,
    RunConfig,
    WorkflowConfig,
)
from marl_jax.learning import BatchConfig, LearnerConfig, OptimiserConfig, ScheduleConfig
from marl_jax.learning.by_role.interventions import InterventionConfig, Mixing
from marl_jax.learning.estimators.worth import AdvantageConfig
from marl_jax.models import ModelConfig, init, save_hf
from marl_jax.models.tokenizer import build_micro_tokenizer
from marl_jax.rewards import run_program
from marl_jax.rewards.credit import CreditConfig
from marl_jax.workflows import BUILT_IN, Call, Fork, Tool, workflow

MODEL = dataclasses.replace(
    ModelConfig.preset("xs"), num_hidden_layers=1, hidden_size=32, intermediate_size=64
)


def letters(graded):
    """What share of each call's text is small letters."""
    share = lambda text: sum(map(str.islower, text)) / max(len(text), 1)
    return [[share(call.text) for call in one.episode.calls] for one in graded]


def make_base(directory):
    save_hf(directory, MODEL, init(0, MODEL), build_micro_tokenizer())
    return directory


def spell_bytes():
    """A tokenizer of another vocabulary, another spelling (bytes, and some pairs) and another chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pairs = [("c", "h"), ("e", "c"), ("1", "2"), ("+", "1")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["</turn>", "<turn>", *alphabet, *(a + b for a, b in pairs)]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, pairs))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in words[:2]])
    template = (
        "{% for message in messages %}<turn>{{ message['role'][0] }}:{{ message['content'] }}</turn>{% endfor %}"
        "{% if add_generation_prompt %}<turn>a:{% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="</turn>", pad_token="</turn>", chat_template=template
    )


OTHER = dataclasses.replace(
    MODEL, vocab_size=288, num_hidden_layers=2, hidden_size=48, intermediate_size=96, num_key_value_heads=1
)


def other_base(base):
    """The directory of a model of another shape and tokenizer, beside the base; made where it is not."""
    directory = Path(f"{base}-other")
    if not directory.exists():
        save_hf(directory, OTHER, init(1, OTHER), spell_bytes())
    return str(directory)


def tiny_config(base, **changes):
    roles = BUILT_IN["voting"].roles
    plain = RunConfig(
        cell="tiny",
        workflow=WorkflowConfig("voting", {"votes": 2}, prompts="micro"),
        policies=PoliciesConfig(policies.isolated(roles), base=str(base)),
        data=DataConfig("math", "micro_math", problems=4, train_size=16, val_size=4, levels=(1,)),
        sampling=policies.SamplingSettings(max_new_tokens=8),
        engine=EngineConfig(max_prompt=72, lanes=16, steps=4),
        rollout=RolloutConfig(samples=4),
        rewards=CreditConfig(name="tiny_run:letters"),
        # One shape of micro-batches, so that one program is compiled.
        learner=LearnerConfig(
            optimiser=OptimiserConfig(schedule=ScheduleConfig(3e-2)),
            batch=BatchConfig(buckets=(128,), token_budget=128, share_prompts=False),
        ),
        evaluation=EvaluationConfig(every=4, problems=4),
        checkpoints=CheckpointConfig(every=2, latest=2),
        logging=LogConfig(episodes_every=4, episodes_problems=1),
        steps=8,
    )
    return dataclasses.replace(plain, **changes)


def count_in_sandbox(text):
    """A tool: a program that counts the letters of a text, and whether it is right."""
    test = {"call": "count", "args": [text], "expected": len(text)}
    return run_program("def count(text):\n    return len(text)", [test]).passed


@workflow(roles=("generator", "aggregator"), families=("code",))
def tooled(task, prompts):
    draft = yield Call("generator", prompts.generator(question=task.question))
    right = yield Tool(count_in_sandbox, (draft.text,), timeout_s=60.0)
    return (yield Call("aggregator", [{"role": "user", "content": f"{draft.text} {right}"}]))


@workflow(roles=("generator", "aggregator"))
def forking(task, prompts, *, rng):
    """A tree of six paths, with a tool before the first fork and one behind it."""
    draft = yield Call("generator", prompts.generator(question=task.question), keep=True)
    told = yield Tool(len, (draft.text,), timeout_s=60.0)
    branch = yield Fork(2)
    also = yield Tool(int, (branch,), timeout_s=60.0)
    word = "ab"[rng.integers(2)]
    more = yield Call("generator", [{"role": "user", "content": f"{told}{also}{word}"}], after=draft)
    yield Fork(2 + 2 * branch)
    return (yield Call("aggregator", [{"role": "user", "content": more.text}], reads=[more]))


def lora(config):
    chosen = dataclasses.replace(config.policies, train="lora", lora_rank=2, lora_alpha=4.0)
    return dataclasses.replace(config, policies=chosen)


def intervened(config):
    """Damped, and anchored by a KL penalty."""
    interventions = InterventionConfig(mixing=Mixing(damping=0.2), kl_coef={"generator": 0.1})
    return dataclasses.replace(
        config, learner=dataclasses.replace(config.learner, interventions=interventions)
    )


def redrawn(config):
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, draws=3))


def wide(config):
    """Lanes enough for several widths and lengths."""
    engine = dataclasses.replace(config.engine, lanes=128)
    return dataclasses.replace(config, engine=engine, rollout=RolloutConfig(samples=16))


def with_tools(config):
    """Programs in the sandbox, as a tool and for the grade."""
    return dataclasses.replace(
        config,
        workflow=WorkflowConfig("tiny_run:tooled", prompts="micro"),
        data=dataclasses.replace(config.data, family="code", name="micro_code"),
        engine=dataclasses.replace(config.engine, max_prompt=400),
        learner=dataclasses.replace(config.learner, batch=BatchConfig(buckets=(512,), share_prompts=False)),
    )


def branching(config):
    """Episodes that fork, their siblings packed behind the prompts that they share."""
    return dataclasses.replace(
        packed(config),
        workflow=WorkflowConfig("tiny_run:forking", prompts="micro"),
        engine=dataclasses.replace(config.engine, max_prompt=160),
        rollout=RolloutConfig(samples=2),
    )


def packed(config):
    """Prompts shared and rows packed, in micro-batches of several shapes."""
    return dataclasses.replace(config, learner=dataclasses.replace(config.learner, batch=BatchConfig()))


def phased(config):
    """Play and collect, SFT from the base, DPO against its start, policies that change places, and again."""
    phases = (
        Phase(2, "play", collect=True),
        Phase(2, "sft", objective="sft", source="collected", start="base", learner={"preference.best": 1}),
        Phase(2, "dpo", objective="dpo", source="collected:play", reference="start", optimiser="fresh"),
        Phase(1, "swap", copies={"p0": "p1", "p1": "p0"}, roles=("generator",)),
    )
    return dataclasses.replace(config, phases=phases)


def differing(config):
    """Two policies on models of different shapes and tokenizers, one trained in full, one by an adapter."""
    policies_ = dataclasses.replace(
        config.policies,
        map={"generator": "p0", "evaluator": "p1"},
        bases={"p1": other_base(config.policies.base)},
        trains={"p1": "lora"},
        lora_rank=2,
        lora_alpha=4.0,
    )
    anchored = InterventionConfig(kl_coef={"generator": 0.1, "evaluator": 0.1})
    batch = BatchConfig(buckets=(256,), token_budget=256, share_prompts=False)
    return dataclasses.replace(
        config,
        workflow=WorkflowConfig("eval_opt", {"rounds": 2}, prompts="micro"),
        policies=policies_,
        engine=EngineConfig(max_prompt=240, lanes=16, steps=4),
        learner=dataclasses.replace(config.learner, interventions=anchored, batch=batch),
        evaluation=EvaluationConfig(every=3, problems=4),
        checkpoints=CheckpointConfig(every=1, latest=2),
        steps=3,
    )


def in_arrays(config):
    """On the compiled road, whose rewards are built in: nobody is right, so what is learned is to be short."""
    alone = {
        "workflow": WorkflowConfig("single", prompts="micro"),
        "policies": dataclasses.replace(config.policies, map={"generator": "p0"}),
        "advantages": AdvantageConfig(overlong=(8, 7)),
    }
    return dataclasses.replace(config, road="compiled", rewards=CreditConfig(), **alone)


def voting_in_arrays(config):
    """Two policies, each with its optimiser."""
    alone = in_arrays(config)
    return dataclasses.replace(alone, workflow=config.workflow, policies=config.policies)


def seeds_in_arrays(config):
    return dataclasses.replace(in_arrays(config), seeds=2, steps=4)


def seeds_in_one_program(config):
    """As on an accelerator, if `in_arrays._in_one_program` says so."""
    return dataclasses.replace(in_arrays(config), seeds=2)


def cut_in_arrays(config):
    """Problems are cut over two pairs of devices, and weights over the two of each pair."""
    return dataclasses.replace(in_arrays(config), mesh=MeshConfig(data=2, model=2))


def cut_alone_in_arrays(config):
    return dataclasses.replace(in_arrays(config), mesh=MeshConfig(model=2))


def cut_bases_in_arrays(config):
    """Below adapters, which are whole on every device."""
    return cut_in_arrays(lora(config))


CUT = {kind.__name__: kind for kind in (cut_in_arrays, cut_alone_in_arrays, cut_bases_in_arrays)}
_RUN = (lora, intervened, redrawn, wide, with_tools, packed, branching, phased, differing)
_SEEDS = (seeds_in_arrays, seeds_in_one_program)
_CHANGED = (*_RUN, in_arrays, voting_in_arrays, *_SEEDS, *CUT.values())
KINDS = {"plain": lambda config: config, **{kind.__name__: kind for kind in _CHANGED}}


def send_before(owner, name, number, visit, seconds, stuck):
    """Send the process a signal so many seconds after the Nth call of a function, which then sleeps for a while."""
    inner, visits = getattr(owner, name), itertools.count(1)

    def send():
        os.write(1, f"signalled at {time.time()}\n".encode())  # the run may be ending, and holding stdout
        os.kill(os.getpid(), number)

    def call(*args, **options):
        if next(visits) == visit:
            timer = threading.Timer(seconds, send)
            timer.daemon = True
            timer.start() if seconds else send()
            time.sleep(stuck)
        return inner(*args, **options)

    setattr(owner, name, call)


def checks_cuts(take_step):
    """The same, where weights and their moments are cut before it and behind it."""

    def taken(programs, state, *given):
        cut = lambda tree: any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(tree))
        after = take_step(programs, state, *given)
        (trees, learner), _, _ = after
        if state.bases:
            assert cut(state.bases)
        else:
            assert cut(state.trees) and cut(trees) and cut([own.optimiser for own in learner.values()])
        return after

    return taken


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("base")
    parser.add_argument("workdir")
    parser.add_argument("--kind", default="plain", choices=KINDS)
    parser.add_argument("--signal", default="SIGKILL")
    parser.add_argument("--at", choices=("opening", "step", "learning", "policy"))
    parser.add_argument("--visit", type=int, default=1)
    parser.add_argument("--after", type=float, default=0.0)
    parser.add_argument("--stuck", type=float, default=0.0)
    asked = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    from marl_jax.learning import Learner
    from marl_jax.runs import in_arrays, loop
    from marl_jax.runs.loading import play

    places = {
        "opening": (play, "load_parts"),
        "step": (loop, "step"),
        "learning": (Learner, "step"),
        "policy": (Learner, "_update"),
    }
    if asked.at:
        number = signal.Signals[asked.signal]
        send_before(*places[asked.at], number, asked.visit, asked.after, asked.stuck)
    if asked.kind in CUT:
        in_arrays.take_step = checks_cuts(in_arrays.take_step)
    if asked.kind == "seeds_in_one_program":
        in_arrays._in_one_program = lambda *_: True
    loop.train(KINDS[asked.kind](tiny_config(asked.base)), asked.workdir, patience=2.0)


if __name__ == "__main__":
    main()
