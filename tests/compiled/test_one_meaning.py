"""Both roads say the same: from one state, the same tokens but for near-ties; of the same tokens, the same numbers."""

import dataclasses
import functools
import json
import shutil

import both_roads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from both_roads import Hosted, debating, distance, moments, norm, obeying, small

from marl_jax import compiled
from marl_jax.compiled import step as step_of
from marl_jax.compiled.learn import units_of
from marl_jax.compiled.script import Field
from marl_jax.config.cells import all_cells
from marl_jax.learning.by_role.step_report import gradient_report
from marl_jax.models import forward
from marl_jax.models.lora import merge
from marl_jax.models.tokenizer import load_tokenizer
from marl_jax.rewards.grading import grade
from marl_jax.runs.loading.parts import load_parts
from marl_jax.runs.loading.play import player_of
from marl_jax.sampling.methods import noise
from marl_jax.sampling.requests import noise_key
from marl_jax.table import Ragged
from marl_jax.workflows import BUILT_IN, Call, parse

ADAPTERS = {"policies.train": "lora", "policies.lora_rank": "4"}
RUBRIC = {"rewards.name": "voting_rubric", "advantages.group": "study"}
PER_CALL = {"learner.interventions.mixing.normalise_multiplicity": "true"}
MIXED = {  # every switch that weighs the parts of roles, an anchor, and what is said of slots and layers
    "learner.interventions.mixing.balance": "equalise",
    "learner.interventions.mixing.project_conflicts": "true",
    "learner.interventions.role_clip": '{"generator": 0.05}',
    "learner.interventions.kl_coef": '{"aggregator": 0.1}',
    "learner.gradients": "slots",
    "learner.layer_norms": "true",
}
DAMPED = {"learner.interventions.mixing.damping": "0.3", "learner.mask_truncated": "true"}
CAPPED = {
    "learner.interventions.mixing.balance": "cap",
    "learner.interventions.mixing.max_share": "0.3",
    "learner.interventions.mixing.roles": "generator",
}
IN_TURN = {"learner.interventions.alternate": "aggregator,generator"}
CELLS = {
    "voting isolated": lambda: small("voting-isolated-xs-math", **{"sampling.temperature": "0.9"}),
    "single": lambda: small("single-shared-xs-math"),
    "single_matched": lambda: small("single_matched-shared-xs-math"),
    "eval_opt isolated": lambda: small("eval_opt-isolated-xs-math", **{"workflow.settings.rounds": "2"}),
    "orch_workers isolated": lambda: small("orch_workers-isolated-xs-math"),
    "debate": debating,
    "voting shared": lambda: small("voting-shared-xs-math", **RUBRIC, **PER_CALL),
    "eval_opt shared": lambda: small("eval_opt-shared-xs-math", **{"rewards.name": "own_correctness"}),
    "orch_workers shared": lambda: small("orch_workers-shared-xs-math", **{"rewards.name": "team_and_local"}),
    "planner_coder": lambda: small("planner_coder-isolated-xs-code"),
    "single on code": lambda: small("single-shared-xs-code"),
    "voting on code": lambda: small("voting-shared-xs-code"),
    "voting isolated on code": lambda: small("voting-isolated-xs-code"),
    "eval_opt on code": lambda: small("eval_opt-isolated-xs-code"),
    "eval_opt shared on code": lambda: small("eval_opt-shared-xs-code"),
    "orch_workers on code": lambda: small("orch_workers-isolated-xs-code"),
    "orch_workers shared on code": lambda: small("orch_workers-shared-xs-code"),
    "voting shared mixed": lambda: small("voting-shared-xs-math", **MIXED),
    "voting isolated damped": lambda: small("voting-isolated-xs-math", **DAMPED),
    "voting shared in turn": lambda: small("voting-shared-xs-math", **IN_TURN),
    "eval_opt in one conversation": lambda: small(
        "eval_opt-shared-xs-math", **{"workflow.settings.shared": "true"}
    ),
    "single_matched on code": lambda: small("single_matched-shared-xs-code"),
    "planner_coder shared": lambda: small("planner_coder-shared-xs-code"),
    "debate on code": lambda: small("debate-shared-xs-code"),
    # So many lanes that the last quarter is gathered.
    "voting of many lanes": lambda: small("voting-isolated-xs-math", **{"data.problems": "24"}),
    "voting shared at s": lambda: small("voting-shared-s-math"),
    "voting isolated at s on code": lambda: small("voting-isolated-s-code"),
    "voting isolated in turn": lambda: small("voting-isolated-xs-math", **IN_TURN),
    "voting beside a frozen picker": lambda: small(
        "voting-isolated-xs-math", **{"policies.frozen_roles": "aggregator"}
    ),
    "voting shared capped": lambda: small("voting-shared-xs-math", **CAPPED),
}
# Adapters in every cell whose workflow has a form.
CELLS |= {
    f"{cell} with adapters": functools.partial(small, cell, **ADAPTERS)
    for cell in map(str, all_cells(("xs",)))
    if BUILT_IN[cell.partition("-")[0]].in_arrays
}
NEAR = 1e-5  # two tokens are that near to a tie if so much of the probability lies between the draw and the other


class NearTies:
    """The calls that were sampled on both roads from one prompt, their tokens, and those that differ."""

    def __init__(self):
        self.calls, self.tokens, self.parted = 0, 0, []

    def __str__(self):
        """In a form that can be added up over cells."""
        parted = len(self.parted)
        return (
            f"{parted} of {self.calls} calls and {parted} of {self.tokens} sampled tokens differ, "
            f"each with a margin below {NEAR:.0e}"
        )

    @property
    def few(self):
        """At most a thousandth of the calls; one where a thousandth is less than a call."""
        return len(self.parted) <= max(1, 0.001 * self.calls)


NEAR_TIES = {}  # by cell; a call that parts is (task, sample, call, token, margin)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.campaign if i else pytest.mark.long)
        for i, name in enumerate(CELLS)
    ],
)
def roads(request):
    """(the hosted run, the step of its cell in parts, each compiled)."""
    hosted = Hosted(CELLS[request.param]())
    halves = compiled.make_halves(hosted.config, parts=hosted.parts)
    return hosted, compiled.Halves(jax.jit(obeying(halves.play)), jax.jit(halves.learn, static_argnums=0))


def test_both_roads_take_the_same_step(roads, request):
    """Where no right program leaves the language of the arrays: such a one earns 0 there, and is counted.

    A cell has 120 to 1,920 calls, of which one may be more than a thousandth; that is the bound over all cells, below.
    """
    hosted, halves = roads
    name, whole = request.node.callspec.params["roads"], 0
    found = NEAR_TIES[name] = NearTies()
    for _ in range(5):
        tasks = next(hosted.problems)
        before = hosted.compiled_state()
        free = halves.step(before, *hosted.tasks(tasks))
        again = halves.step(before, *hosted.tasks(tasks))
        table, report = hosted.step(tasks)
        imposed = halves.step(before, *hosted.tasks(tasks, table))

        assert_equal_to_the_bit(free, again)
        compare(hosted, before, table, on_host(hosted, free, tasks), found)
        right = (np.asarray(table.grade) > 0) | (np.asarray(table.outcome) > 0)  # by the sandbox
        if (outside := beyond(imposed) & right).any():
            there = on_host(hosted, imposed, tasks)
            assert_same_texts(table, imposed, there)
            graded = np.asarray(there.grade)
            np.testing.assert_array_equal(graded[~outside], np.asarray(table.grade)[~outside])
            assert not np.nan_to_num(graded[outside]).any()
            continue
        whole += 1
        assert_same_texts(table, imposed, on_host(hosted, imposed, tasks))
        assert_same_worth(table, on_host(hosted, imposed, tasks))
        # Gradients of one table: how far the log-probs of two samplers lie apart is what was compared before.
        sampled = halves._replace(play=lambda *given, table=table: with_logprobs(halves.play(*given), table))
        assert_same_update(hosted, before, sampled.step(before, *hosted.tasks(tasks, table)), report)
    print(f"near-ties: {found}; {name}, {whole} of 5 steps whole", *found.parted)
    assert whole and found.few


@pytest.mark.campaign
def test_near_ties_are_at_most_a_thousandth_of_the_calls_of_all_cells(capsys):
    """Of the cells that were compared before, in this process. The sum is shown even if nothing else is (no -s)."""
    if not NEAR_TIES:
        pytest.skip("no cell was compared in this process before")
    found = NearTies()
    for name, cell in NEAR_TIES.items():
        found.calls, found.tokens = found.calls + cell.calls, found.tokens + cell.tokens
        found.parted += [(name, *call) for call in cell.parted]
    with capsys.disabled():
        print(f"\nall {len(NEAR_TIES)} cells: {found}", *found.parted, sep="\n  ")
    assert found.few


@pytest.mark.long
@pytest.mark.parametrize("roads", ["voting isolated"], indirect=True)
def test_a_prompt_that_is_longer_as_text_than_as_it_was_said_is_cut_and_counted(roads):
    """A model says "use", then the word "return "; in the next prompt that is the word "user", and six characters."""
    hosted, halves = roads
    tasks, most = next(hosted.problems), hosted.config.sampling.max_new_tokens
    encode = functools.partial(hosted.parts.tokenizer.encode, add_special_tokens=False)
    said = ([*encode("use"), *encode("return ")] * most)[:most]
    (words, imposed), given = hosted.tasks(tasks)
    imposed[:, :, :3] = said
    columns, _ = halves.play(hosted.compiled_state(), (words, imposed), given)
    table = on_host(hosted, (None, columns), tasks)
    shown, bound = hosted.parts.tokenizer.decode(said), columns.widths[3][0]
    assert len(encode(shown)) > len(said)
    control = {code: word for word, code in hosted.cast.alphabet.control.items()}

    def text(piece, task):
        if isinstance(piece, Field):
            return task.question if piece.call is None else shown
        return "".join(control.get(code) or chr(code) for code in piece.codes)

    for row in np.flatnonzero(table.call == 3):
        whole = encode("".join(text(piece, tasks[table.task[row]]) for piece in columns.cues[3].pieces))
        assert table.cut[row] == len(whole) - bound > 0
        np.testing.assert_array_equal(table.prompt[row], whole[:bound])
    assert not table.cut[table.call < 3].any()


@pytest.mark.long
def test_both_roads_end_a_completion_at_what_ends_a_text_by_the_model(tmp_path):
    shutil.copytree("configs/bases/micro-xs", tmp_path / "base")
    ends = [2, load_tokenizer(tmp_path / "base").convert_tokens_to_ids("\\boxed")]
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    hosted = Hosted(small("single-shared-xs-math", **{"policies.base": str(tmp_path / "base")}))
    tasks, before = next(hosted.problems), hosted.compiled_state()
    play = jax.jit(obeying(compiled.make_halves(hosted.config, parts=hosted.parts).play))
    played = play(before, *hosted.tasks(tasks))[0]
    player, hosted.number = player_of(hosted.config, hosted.parts, hosted.service), 1
    table = player.play(tasks, samples=hosted.config.rollout.samples, step=1, seed=hosted.config.seed)
    assert {table.tokens[row][-1] for row in range(len(table))} == {ends[1]} and not table.truncated.any()
    other = on_host(hosted, (None, played), tasks)
    found = NearTies()
    compare(hosted, before, table, other, found)
    assert found.calls and found.few
    np.testing.assert_array_equal(other.truncated, table.truncated)


def says_a_number(task, prompts):
    return (yield Call("generator", prompts.generator(question=task.question), read=parse.stripped))


def test_an_answer_without_its_box_is_right_by_text_and_beyond_the_arrays():
    config = small("single-shared-xs-math", **{"data.problems": "1", "rollout.samples": "2"})
    parts = load_parts(config)
    parts = dataclasses.replace(parts, workflow=dataclasses.replace(parts.workflow, fn=says_a_number))
    (task,), (words, given) = next(compiled.problems(config)), next(compiled.batches(config, parts=parts))
    said = parts.tokenizer.encode(f"{task.gold}<|im_end|>", add_special_tokens=False)
    imposed = np.full((1, 2, 1, len(said)), said, np.int32)
    play = jax.jit(obeying(compiled.make_halves(config, parts=parts).play))
    columns, metrics = play(compiled.start(config, parts=parts), (words, imposed), given)
    table = compiled.to_host(compiled.cast_of(config, parts), columns, [task])
    assert grade(table).outcome.tolist() == [1, 1] and not table.outcome.any() and metrics["beyond"] == 2


@pytest.mark.long
def test_both_roads_mask_the_same_sequences(monkeypatch):
    """Every other call was sampled under log-probs that are half a nat a token off, as another engine's may be."""

    def on_device(cast, columns, worth=step_of.with_advantages):
        columns = worth(cast, columns)
        off = 0.5 * (jnp.arange(len(columns.table.length)) % 2)
        logprobs = columns.table.logprobs - off[:, None]
        return columns.replace(table=columns.table.replace(logprobs=logprobs))

    def in_the_table(table, *args, inner=both_roads.with_advantages):
        table, groups = inner(table, *args)
        rows = [table.logprobs[row] - np.float32(0.5 * (row % 2)) for row in range(len(table))]
        return table.replace(logprobs=Ragged.of(rows, np.float32)), groups

    hosted = Hosted(small("single-shared-xs-math", **{"learner.loss.mask_ratio": "0.8,1.25"}))
    monkeypatch.setattr(step_of, "with_advantages", on_device)
    monkeypatch.setattr(both_roads, "with_advantages", in_the_table)
    step = jax.jit(obeying(compiled.make_step(hosted.config, parts=hosted.parts)))
    tasks, before = next(hosted.problems), hosted.compiled_state()
    table, report = hosted.step(tasks)
    result = step(before, *hosted.tasks(tasks, table))
    share = table.length[1::2].sum() / table.length.sum()
    assert 0.2 < share < 0.8 and report.policies["p0"]["ratio_masked"] == pytest.approx(share, abs=1e-6)
    loss = result[2]["policy"]["p0"]["loss"]
    assert float(loss.metrics["ratio_masked"].value) == pytest.approx(share, abs=1e-6)
    assert_same_update(hosted, before, result, report)


def on_host(hosted, result, tasks):
    return compiled.to_host(hosted.cast, result[1], tasks, seed=hosted.config.seed, step=hosted.number)


def assert_equal_to_the_bit(one, other):
    for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


def compare(hosted, state, table, other, found):
    """Count the calls of one prompt, and those at which an episode goes its own way behind a near-tie."""
    for mine, theirs in zip(table.episodes(), other.episodes(), strict=True):
        for number, (a, b) in enumerate(zip(mine.calls, theirs.calls)):
            assert (a.role, a.slot, a.turn, a.reads, a.after) == (b.role, b.slot, b.turn, b.reads, b.after)
            assert a.prompt_tokens == b.prompt_tokens
            found.calls += 1
            if a.tokens != b.tokens:
                at = next(i for i, pair in enumerate(zip(a.tokens, b.tokens)) if pair[0] != pair[1])
                found.tokens += at + 1
                margin = gap(hosted, state, mine.key, number, a, b, at)
                found.parted.append((mine.task.id, mine.sample, number, at, float(f"{margin:.1e}")))
                assert margin < NEAR, found.parted[-1]
                break
            found.tokens += len(a.tokens)
        else:
            assert len(mine.calls) == len(theirs.calls)
            assert mine.answer == theirs.answer


def gap(hosted, state, key, number, a, b, at):
    """How far the draw of the first token that differs is from what would have drawn the other one."""
    parts = hosted.parts
    tree = state.trees[a.policy] if a.policy in state.trees else state.bases[a.policy]  # it does not learn
    if parts.lora_scale is not None and a.policy in state.trees:
        tree = merge(state.bases[a.policy], tree, parts.lora_scale)
    said = jnp.array([a.prompt_tokens + a.tokens[:at]])
    logits = np.asarray(forward(tree, parts.model, said)[0, -1], np.float64) / a.temperature
    weights = np.exp(logits - logits.max())
    size = int(np.sqrt(len(weights) - 1)) + 1
    blocks = np.pad(weights, (0, -len(weights) % size)).reshape(-1, size)
    uniforms = np.asarray(noise(noise_key((*key, number))[None], jnp.array([at])))[0]
    draws = [(blocks.sum(axis=1), uniforms[0])]
    if a.tokens[at] // size == b.tokens[at] // size:
        draws = [(blocks[a.tokens[at] // size], uniforms[1])]
    sums = np.cumsum(draws[0][0]) / np.sum(draws[0][0])
    return np.abs(sums - draws[0][1]).min()


def with_logprobs(played, table):
    """What was played, with the log-probs of the hosted engine."""
    columns, metrics = played
    logprobs = np.array(columns.table.logprobs)
    for row, values in zip(
        np.flatnonzero(columns.table.length), map(table.logprobs.__getitem__, range(len(table)))
    ):
        logprobs[row, : len(values)] = values
    return columns.replace(table=columns.table.replace(logprobs=jnp.asarray(logprobs))), metrics


def beyond(result):
    """The rows whose answer has no grade in arrays."""
    columns = result[1]
    return np.asarray(columns.beyond)[np.flatnonzero(columns.table.length)]


def assert_same_texts(table, result, other):
    """Of the tokens that were imposed: what the device read, and how probable they are."""
    on_device, made = result[1].table, np.flatnonzero(result[1].table.length)
    names = [f"{episode}/{call}" for episode, call in zip(table.episode, table.call)]
    assert len(made) == len(table), names
    assert [tuple(x) for x in map(other.tokens.__getitem__, range(len(other)))] == [
        tuple(x) for x in map(table.tokens.__getitem__, range(len(table)))
    ]
    for column in ("readable", "choice", "truncated", "length", "kind", "slot", "turn", "version"):
        np.testing.assert_array_equal(
            np.asarray(getattr(on_device, column))[made], getattr(table, column), column
        )
    assert [head.answer for head in other.bare_episodes] == [head.answer for head in table.bare_episodes]
    for column in (
        "episode",
        "task",
        "call",
        "after",
        "readable",
        "choice",
        "kind",
        "trains",
        "temperature",
        "group",
        "text",
        "answer",
    ):
        np.testing.assert_array_equal(getattr(other, column), getattr(table, column), column)
    for column in ("prompt", "tokens"):
        ours, theirs = getattr(other, column), getattr(table, column)
        for field in ("values", "starts", "lengths"):
            np.testing.assert_array_equal(getattr(ours, field), getattr(theirs, field), column)
    read = lambda of: [[place for place in row if place >= 0] for row in of.reads.tolist()]
    assert read(other) == read(table)
    named = lambda of: [(of.role_of(row), of.policies[of.policy[row]]) for row in range(len(of))]
    assert named(other) == named(table)
    # Either road has tokens that are 2.2e-5 from float64.
    off = np.abs(np.concatenate([other.logprobs[row] - table.logprobs[row] for row in range(len(table))]))
    assert (off > 2e-5).sum() <= 0.001 * len(off) and off.max() < 1e-4, np.sort(off)[-4:]


def assert_same_worth(table, other):
    """Grades, and what follows from them."""
    for column in ("grade", "outcome", "sound"):
        np.testing.assert_array_equal(getattr(other, column), getattr(table, column), column)
    assert other.components.keys() == table.components.keys()
    for name, values in table.components.items():
        np.testing.assert_array_equal(other.components[name], np.float32(values), name)
    for column in ("reward", "advantage"):  # float32 on the device
        np.testing.assert_array_equal(getattr(other, column), np.float32(getattr(table, column)), column)


def assert_same_update(hosted, before, result, report):
    """The gradient, in the optimiser's first moments; the Gram matrix of the roles; the weights."""
    state, _, metrics = result
    keeps = 1 - hosted.config.learner.optimiser.b1
    old, new, other = map(moments, (before.learner, hosted.states, state.learner))
    for policy, tree in new.items():
        gradient = jax.tree.map(lambda new, old: (new - (1 - keeps) * old) / keeps, tree, old[policy])
        # Terms that cancel are rounded by their own size: in a step in which little is left of them, it is that of the
        # largest gradient so far. (An evaluator had 0.0088 after 0.57, 0.37, 0.18 and 0.25, with equal errors.)
        size = hosted.sizes[policy] = max(hosted.sizes.get(policy, 1e-12), norm(gradient))
        assert distance(tree, other[policy]) <= 1e-5 * keeps * size
        assert int(state.learner[policy].empty) == hosted.states[policy].empty
        if "grad_norm" not in report.policies[policy]:  # it is another's turn
            assert not metrics["policy"][policy]["rows"]
            assert not distance(state.trees[policy], before.trees[policy])
            continue
        applied = metrics["policy"][policy]["applied"]
        close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5 * size)
        close(applied["grad_norm"], report.policies[policy]["grad_norm"])
        np.testing.assert_allclose(applied["clip_factor"], report.policies[policy]["clip_factor"], rtol=1e-5)
        loss = metrics["policy"][policy]["loss"]
        np.testing.assert_allclose(loss.value, report.policies[policy]["loss"], rtol=0, atol=1e-6)
        said = gradient_report([applied], *units_of(hosted.cast, policy, result[1].cues))
        assert_same_parts(said, report.gradients[policy], size)
        assert int(state.learner[policy].steps) == hosted.states[policy].steps
        assert int(state.learner[policy].updates) == hosted.states[policy].updates
        # Where a gradient is near 0, Adam's step is the sign of a rounding error: elements are compared beyond 1e-3 of
        # the root mean square. Were they normally distributed, an error of 1e-5 of the norm would move those by 3e-4.
        least = 1e-3 * norm(gradient) / np.sqrt(sum(leaf.size for leaf in jax.tree.leaves(gradient)))
        sure = [np.abs(leaf) > least for leaf in jax.tree.leaves(gradient)]
        start, mine, theirs = (
            jax.tree.leaves(trees[policy]) for trees in (before.trees, hosted.trees, state.trees)
        )
        taken = [np.where(some, new - old, 0) for some, old, new in zip(sure, start, mine)]
        off = [np.where(some, new - other, 0) for some, new, other in zip(sure, mine, theirs)]
        assert norm(off) <= 1e-3 * norm(taken)


def assert_same_parts(one, other, size):
    """What is said of the parts of a gradient; a ratio is as sure as the smallest part that moves."""
    sure = 1e-5 * size / min([norm for norm in other["norm"].values() if norm > 0], default=size)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, mine), theirs in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
        what = path[0].key
        if what == "slots":
            continue
        if what == "conflict_rate":  # of cosines whose sign is sure
            if min(map(abs, other["cosine"].values())) > sure:
                assert mine == theirs
            continue
        near = 1e-5 * size if what in ("norm", "resultant", "layers") else 4 * sure
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=near, err_msg=jax.tree_util.keystr(path))
    for role, slots in other.get("slots", {}).items():
        assert_same_parts(one["slots"][role], slots, size)
