"""A script filled with words is the prompts that the hosted workflow asks with."""

import functools
import random

import pytest

from marl_jax.compiled import NoArrayForm
from marl_jax.compiled.alphabet import alphabet_of
from marl_jax.compiled.script import Field, dry_run, mark
from marl_jax.models.tokenizer import build_micro_tokenizer
from marl_jax.rollouts import Chat
from marl_jax.task import Task
from marl_jax.workflows import BUILT_IN, Call, Completion, load_prompts, solver, workflow
from marl_jax.workflows.parse import plan_of, verdict

TOKENIZER = build_micro_tokenizer()
CHAT, ALPHABET = Chat(TOKENIZER), alphabet_of(TOKENIZER, 160)
PROMPTS = load_prompts("math", "micro")
TASK = Task("t", "math", "3+4=?", gold="7")
FORMS = {name: flow for name, flow in BUILT_IN.items() if flow.in_arrays is not None}


def hosted_prompts(workflow, prompts, said):
    """The text that each call adds, where completion k says `said[k]` and nothing can be read in it."""
    script, reply, added = workflow(TASK, prompts), None, []
    while True:
        try:
            asked = script.send(reply)
        except StopIteration:
            return added
        replies = []
        for call in asked if isinstance(asked, list) else [asked]:
            added.append("".join(CHAT.texts(call.messages, after=call.after is not None)))
            replies.append(Completion(said[len(added) - 1], (), (), "stop", None, len(added) - 1))
        reply = replies if isinstance(asked, list) else replies[0]


def filled(cue, said):
    spelled = {code: word for word, code in ALPHABET.control.items()}

    def text(piece):
        if isinstance(piece, Field):
            return TASK.question if piece.call is None else said[piece.call]
        return "".join(spelled.get(code) or chr(code) for code in piece.codes)

    return "".join(map(text, cue.pieces))


@pytest.mark.parametrize("name", FORMS)
def test_a_filled_script_is_what_the_hosted_generator_asks(name):
    rng = random.Random(name)
    said = ["".join(rng.choices("abc 123", k=5)) for _ in range(9)]
    family = "math" if "math" in FORMS[name].families else "code"
    prompts = load_prompts(family, "micro")
    cues = [cue for batch in dry_run(FORMS[name], prompts, CHAT, ALPHABET, family, {}) for cue in batch]
    assert [filled(cue, said) for cue in cues] == hosted_prompts(FORMS[name], prompts, said)


def test_what_a_plan_says_leads_to_the_workers_that_it_asks_for():
    plan = "STRATEGY 1: columns\nSTRATEGY 2: parts"
    _, workers, _ = dry_run(FORMS["orch_workers"], PROMPTS, CHAT, ALPHABET, "math", {0: plan})
    assert [cue.slot for cue in workers] == [0, 1]
    assert filled(workers[1], []) == "<|im_start|>user\n3+4=?\nby parts<|im_end|>\n<|im_start|>assistant\n"


def user(content):
    return [{"role": "user", "content": content}]


def by_field(task, prompts):
    yield Call("generator", user(f"{task.question} {task.meta['hint']}"))


def with_answer(task, prompts):
    draft = yield Call("generator", user(task.question))
    yield Call("generator", user(f"{draft} says {draft.answer}"))


def by_answer(task, prompts):
    draft = yield Call("generator", user(task.question))
    yield Call("generator", user("again" if draft.answer is None else str(draft)))


def shortened(task, prompts):
    draft = yield Call("generator", user(task.question))
    yield Call("generator", user(draft.text.strip()))


def counted(task, prompts):
    draft = yield Call("generator", user(task.question))
    yield Call("generator", user(str(draft)), slot=int(draft.answer))


def drafts_of(task, count=2):
    return [Call("generator", user(task.question), slot=slot) for slot in range(count)]


def readable_ones(task, prompts):
    drafts = yield drafts_of(task, 3)
    shown = [draft for draft in drafts if draft.answer] or drafts
    yield Call("generator", user(" ".join(map(str, shown))))


def surest(task, prompts):
    drafts = yield drafts_of(task)
    return max(drafts, key=lambda draft: sum(draft.logprobs))


def goes_on_where_cut(task, prompts):
    draft = yield Call("generator", user(task.question))
    if draft.finish_reason == "length":
        yield Call("generator", user("go on"), after=draft)


def breaks_ties(task, prompts):
    one, other = yield drafts_of(task)
    if one.answer != other.answer:
        yield Call("generator", user(f"{one} {other}"))


def until_right(task, prompts):
    for _ in range(3):
        draft = yield Call("generator", user(task.question))
        review = yield Call("generator", user(str(draft)), read=verdict)
        if review.answer != "Incorrect":
            return draft


def until_readable(task, prompts):
    while not (draft := (yield Call("generator", user(task.question)))).answer:
        pass
    return draft


def a_text(task, prompts):
    return (yield Call("generator", user(task.question))).text


@pytest.mark.parametrize(
    ("flow", "what"),
    [
        (by_field, r"looks at task\.meta"),
        (with_answer, "depends on what was read"),
        (by_answer, "depends on what was read"),
        (shortened, "changes a shown text"),
        (counted, r"raises TypeError: int\(\) .* \(in counted, line \d+\) when no answer can be read"),
        (readable_ones, "depends on what was read"),
        (surest, "looks at the logprobs of a completion"),
        (goes_on_where_cut, "looks at the finish_reason of a completion"),
        (breaks_ties, "makes other calls after other answers"),
        (until_right, "makes other calls after other answers"),
        (until_readable, r"more than \d+ calls, if nothing can be read"),
        (a_text, "returns no answer of a call"),
    ],
)
def test_prompts_of_more_than_whole_texts_and_other_calls_are_refused(flow, what):
    """They would be the same in all episodes, whatever is said."""
    own = workflow(roles={"generator": solver})(flow)
    with pytest.raises(NoArrayForm, match=what):
        dry_run(own, PROMPTS, CHAT, ALPHABET, "math", {})


def asks_again(task, prompts):
    draft = yield Call("generator", user(task.question))
    return draft if draft.answer else (yield Call("generator", user("again"), after=draft))


def by_the_answer_of_a_plan(task, prompts):
    plan = yield Call("generator", user(task.question), read=functools.partial(plan_of, limit=2))
    ways = plan.answer.split("\n") if plan.answer else ["any way"]
    return (yield [Call("generator", user(way), slot=slot) for slot, way in enumerate(ways)])[0]


def test_a_workflow_may_end_sooner_and_a_plan_is_read_as_its_call_reads_it():
    script = lambda flow, texts: dry_run(
        workflow(roles={"generator": solver})(flow), PROMPTS, CHAT, ALPHABET, "math", texts
    )
    assert [[cue.call for cue in batch] for batch in script(asks_again, {})] == [[0], [1]]
    assert len(script(by_the_answer_of_a_plan, {})[1]) == 1
    plan = f"STRATEGY 1: {mark(0, 0)}\nSTRATEGY 2: {mark(0, 1)}"
    ways = script(by_the_answer_of_a_plan, {0: plan})[1]
    assert [piece for cue in ways for piece in cue.pieces if isinstance(piece, Field)] == [
        Field(0, 0),
        Field(0, 1),
    ]
