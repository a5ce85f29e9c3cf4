"""The stage: the interface on which the array form of a workflow plays all episodes at once.

    @voting.arrays
    def voting_in_arrays(stage, *, votes):
        drafts = stage.say()                                    # the next calls of the script, in all episodes
        return drafts.at(stage.say().choice[:, 0].clip(1) - 1)  # the answer that each episode ends with

The script (see `script`) has the role, prompt, reader and history of each call. The form only decides what follows
from the answers: `end` masks episodes that are over, `follow` takes the path of the script that belongs to a plan.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marl_jax.compiled.alphabet import join, spell, tokenise
from marl_jax.compiled.cast import Cast
from marl_jax.compiled.decoding import Static, decode
from marl_jax.compiled.readers import Read, check_chooser, form_of, same_reader
from marl_jax.compiled.refusal import NoArrayForm
from marl_jax.compiled.script import Cue, Field, Piece, mark, side_by_side
from marl_jax.compiled.widths import by_width
from marl_jax.models.weight_table import Tree
from marl_jax.policies import policy_of
from marl_jax.ragged import padded
from marl_jax.rewards.arrays import Text
from marl_jax.rewards.arrays.role_readers import majority
from marl_jax.sampling.programs import Features, Lanes

OUTSIDE = 1 << 30  # the place of a call that does not exist: a grade looked up there is not finite
FEW = 1 << 16  # this many characters are tokenised as fast at any width: not worth a second program
Rows = tuple[jax.Array, jax.Array]  # values [B, n] and their lengths [B]
# Tokens [B, P], their lengths [B], and how many were cut off [B].
Prompts = tuple[jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass
class StageCall:
    """One call of the script in all episodes, and later one row of the table per episode."""

    cue: Cue  # that of the first path with this call
    policy: str
    made: Any  # Bool[E]
    reads: Any  # Int[E, R], places of calls: their indices in `Stage.lines`
    bound: int  # the most tokens of its prompt
    by_task: bool = False  # a problem has several episodes, and all of them have the same prompt
    prompt: Any = None  # Rows [E, P]
    cut: Any = None  # Int[E], tokens cut off the end of the prompt so that it fits
    tokens: Any = None  # Int[E, M]
    logprobs: Any = None
    length: Any = None  # Int[E], 0 where the call was not made
    codes: Any = None  # text of the completion, Rows [E, S]
    read: Any = None  # `Read` of E texts, None until `Stage.read` is asked for it


class Answers:
    """The completions of n parallel calls in E episodes. An answer is its call's place in `Stage.lines`, Int[E]."""

    def __init__(self, stage: "Stage", first: int, lines: Sequence[StageCall]):
        self._stage, self._first, self._lines = stage, first, lines
        self.made: jax.Array = jnp.stack([line.made for line in lines], axis=1)  # Bool[E, n]

    @property
    def readable(self) -> jax.Array:
        """Bool[E, n]: whether there is an answer."""
        return self._read("readable")

    @property
    def choice(self) -> jax.Array:
        """Int[E, n]: a verdict or a pick, else -1."""
        return self._read("choice")

    @property
    def count(self) -> jax.Array:
        """Int[E, n]: the number of parts of a plan."""
        return self._read("count")

    def at(self, slot: jax.Array | int) -> jax.Array:
        """The answer of one slot [E]; a number below 0 counts from the last, as in Python."""
        count = len(self._lines)
        if not isinstance(slot, int | np.integer):
            slot = jnp.asarray(slot, jnp.int32)
            place = jnp.where((slot >= 0) & (slot < count), self._first + slot, OUTSIDE)
        elif -count <= slot < count:
            place = jnp.int32(self._first + slot % count)
        else:
            raise NoArrayForm(f"the form asks for slot {slot} of {count} parallel calls")
        return jnp.broadcast_to(place, self.made.shape[:1])

    def over(self, before: jax.Array | None) -> jax.Array:
        """The answer of a single call; in episodes that did not make the call, the answer `before`."""
        self.single("over")
        return self.at(0) if before is None else jnp.where(self.made[:, 0], self.at(0), before)

    def majority(self) -> jax.Array:
        """The first answer among the most frequent readable ones."""
        return self.at(jax.vmap(majority)(self._read("key"), self.readable & self.made))

    def part(self, number: int) -> str:
        """The mark of a part of a single call's text, for the texts of `Stage.follow`."""
        return mark(self.single("part").cue.call, number)

    def single(self, asking: str) -> StageCall:
        """The call, where there is only one."""
        if len(self._lines) > 1:
            raise NoArrayForm(
                f"`{asking}` is for a single call, and the form uses it on {len(self._lines)} parallel calls"
            )
        return self._lines[0]

    def _read(self, name: str) -> jax.Array:
        return jnp.stack([getattr(read, name) for read in self._stage.read(self._lines)], axis=1)


class Stage:
    """All episodes of a step while they are played."""

    def __init__(
        self,
        cast: Cast,
        weights: Mapping[str, tuple[Tree, Tree | None]],  # by policy: all weights, and their adapter
        tasks: Any,  # `step.Tasks`
        noise: Callable[[jax.Array], jax.Array],  # Int[E, n], numbers of calls -> uint32 [E, n, 2]
        seeds_axis: str | None = None,
        episodes: int | None = None,
    ):
        self.cast, self.family = cast, cast.config.data.family
        self.lines: list[StageCall] = []
        self._weights, self._tasks, self._noise, self._seeds_axis = weights, tasks, noise, seeds_axis
        self.episodes = episodes or len(tasks.id) * cast.samples
        self.live = jnp.ones(self.episodes, bool)
        self.astray = ~self.live  # episodes that follow a text that is not there; their answer has no place
        self.texts: list[Mapping[int, str]] = [{}]  # by path: the texts of some calls
        self._path, self._batch = jnp.zeros(self.episodes, jnp.int32), 0
        self._batches = side_by_side([cast.script({}, check=False)])  # of all paths

    def say(self) -> Answers:
        """Make the next calls of the script, in the episodes that are not over."""
        if not self.more:
            raise NoArrayForm("the form makes more calls than the script of its workflow")
        # A seat is one of the parallel calls, on each path.
        seats = [list(seat) for seat in itertools.zip_longest(*self._batches[self._batch])]
        self._batch, first = self._batch + 1, len(self.lines)
        lines = [self._line(seat) for seat in seats]
        if len({(line.cue.role, same_reader(line.cue.read)) for line in lines}) > 1:
            raise NoArrayForm(
                "parallel calls of several roles, or with several readers, have no form in arrays"
            )
        check_chooser(lines[0].cue.read, lines[0].cue.role, self.cast.parts.workflow)
        for policy in dict.fromkeys(line.policy for line in lines):
            indices = [i for i, line in enumerate(lines) if line.policy == policy]
            self._sample(policy, [lines[i] for i in indices], [seats[i] for i in indices])
        self.lines += lines
        return Answers(self, first, lines)

    @property
    def more(self) -> bool:
        """Whether the script has calls that were not made yet."""
        return self._batch < len(self._batches)

    def read(self, lines: Sequence[StageCall]) -> list[Read]:
        """The `Read` of each line; all other lines that have the same reader and no `Read` yet are read with them.

        So answers, which few workflows look at while they are played, are read and graded once, at the end:
        reading and grading is the largest program of a rollout.
        """
        for line in lines:
            if line.read is None:
                like = same_reader(line.cue.read)
                self._read(
                    [call for call in self.lines if call.read is None and same_reader(call.cue.read) == like]
                )
        return [line.read for line in lines]

    def end(self, over: jax.Array) -> None:
        """Episodes that are `over` [E] make no more calls."""
        self.live &= ~checked(over, jnp.bool_, self.live.shape, "stage.end takes a boolean")

    def follow(self, answers: Answers, texts: Sequence[str], which: jax.Array) -> None:
        """Continue with the script in which the single call of `answers` returns `texts[which]`, `which` Int[E]."""
        if len(self.texts) > 1:
            raise NoArrayForm("a workflow whose path depends on two plans has no form in arrays")
        which = checked(which, jnp.integer, self.live.shape, "stage.follow takes the number of a text")
        call = answers.single("follow").cue.call
        self.texts = [{call: text} for text in texts]
        self._batches = side_by_side([self.cast.script(given, check=False) for given in self.texts])
        # For an index beyond an end JAX would take another text.
        self.astray = (which < 0) | (which >= len(texts))
        self._path = jnp.where(self.astray, 0, which)

    # -- one call

    def _line(self, seat: Sequence[Cue | None]) -> StageCall:
        cue, *others = (cue for cue in seat if cue is not None)
        kind = lambda cue: (cue.role, cue.slot, cue.turn, same_reader(cue.read))
        if any(kind(other) != kind(cue) for other in others):
            raise NoArrayForm(
                "a call whose role, slot, turn or reader differs between paths has no form in arrays"
            )
        made = self.live & self._by_path([cue is not None for cue in seat])
        reads = self._by_path(padded([c.reads if c else () for c in seat]))
        policy = policy_of(self.cast.config.policies.map, cue.role, cue.slot)
        bound = max(self._bound(c) for c in seat if c)
        return StageCall(cue, policy, made, jnp.where(made[:, None], reads, -1), bound)

    def _by_path(self, values: Any) -> jax.Array:
        return jnp.asarray(values)[self._path]

    def _sample(self, policy: str, lines: list[StageCall], seats: list[list[Cue | None]]) -> None:
        cast, role, count = self.cast, lines[0].cue.role, len(lines)
        settings = cast.settings[role]
        prompts, length, cut = self._prompts(seats)
        calls = [self._by_path([0 if cue is None else cue.call for cue in seat]) for seat in seats]
        made = jnp.stack([line.made for line in lines], axis=1).reshape(-1)
        noise = self._noise(jnp.stack(calls, axis=1)).reshape(-1, 2)
        full = lambda value, dtype: jnp.full(len(made), value, dtype)
        lanes = Lanes(
            token=None,
            position=None,
            active=made,
            generated=None,
            max_new=full(settings.max_new_tokens, jnp.int32),
            min_new=full(settings.min_new_tokens, jnp.int32),
            temperature=full(settings.temperature, jnp.float32),
            top_k=full(0, jnp.int32),
            top_p=full(1, jnp.float32),
            stops=jnp.broadcast_to(cast.stops[role], (len(made), len(cast.stops[role]))),
            noise=noise,
            adapter=None,
        )
        parts, features = cast.parts, Features(min_new=settings.min_new_tokens > 0)
        static = Static(parts.model, parts.lora_scale, features, settings.max_new_tokens, self._seeds_axis)
        out = decode(static, *self._weights[policy], prompts, length, lanes)
        share = self.episodes * count // len(prompts)
        split = lambda x: x.reshape(self.episodes, count, *x.shape[1:])
        prompt, prompt_length, cut = (split(jnp.repeat(x, share, axis=0)) for x in (prompts, length, cut))
        spelled = spell(cast.alphabet, out.tokens, out.length, out.tokens.shape[1] * cast.alphabet.longest)
        tokens, logprobs, lengths, codes, sizes = map(split, (*out, *spelled))
        for i, line in enumerate(lines):
            line.prompt, line.by_task = (prompt[:, i], prompt_length[:, i]), len(prompts) < self.episodes
            line.tokens, line.logprobs, line.length = tokens[:, i], logprobs[:, i], lengths[:, i]
            line.codes, line.cut = (codes[:, i], sizes[:, i]), cut[:, i]

    def _bound(self, cue: Cue) -> int:
        """The most tokens of a call's prompt; refused if they may not fit.

        A prompt may have more if a word begins in one token and ends in the next: then it is cut, which is counted.
        """
        max_new = lambda place: self.cast.settings[self.lines[place].cue.role].max_new_tokens
        tokens = 0
        for piece in cue.pieces:
            if not isinstance(piece, Field):
                tokens += piece.tokens
            else:
                tokens += self._tasks.question.shape[1] if piece.call is None else max_new(piece.call)
        if cue.after is not None:
            tokens += self.lines[cue.after].bound + max_new(cue.after) + 1
        config, completion = self.cast.config, self.cast.settings[cue.role].max_new_tokens
        most = min(config.engine.max_prompt, (config.rollout.limits.context or 1 << 30) - completion)
        if tokens > most:
            raise NoArrayForm(
                f"prompts of role '{cue.role}' may take {tokens} tokens, and {most} fit (raise engine.max_prompt "
                "and rollout.limits.context, or lower max_new_tokens)"
            )
        return tokens

    # -- prompts

    def _prompts(self, seats: list[list[Cue | None]]) -> Prompts:
        """The prompts of parallel calls: one per problem if they show no completion, else per episode or per call."""
        contents = {tuple(None if cue is None else (cue.pieces, cue.after) for cue in seat) for seat in seats}
        cues = [cue for seat in seats for cue in seat if cue is not None]
        if len(contents) == 1 and all(cue.after is None for cue in cues):
            shown = {piece.call for cue in cues for piece in cue.pieces if isinstance(piece, Field)}
            if shown <= {None} and len({cue.pieces for cue in cues}) == 1:
                return self._tokenised(cues[0].pieces, by_task=True)
            return self._prompts_of(seats[0])
        each = _equally_wide([self._prompts_of(seat) for seat in seats])
        flat = lambda *xs: jnp.stack(xs, axis=1).reshape(self.episodes * len(xs), *xs[0].shape[1:])
        return jax.tree.map(flat, *each)

    def _prompts_of(self, seat: list[Cue | None]) -> Prompts:
        """The prompts [E, P] of one call, each for the path of its episode."""
        variants: dict[Any, list[int]] = {}
        for path, cue in enumerate(seat):
            if cue is not None:
                variants.setdefault((cue.pieces, cue.after), []).append(path)
        written = []
        for pieces, after in variants:
            rows = self._tokenised(pieces, by_task=False)
            written.append(rows if after is None else self._continued(self.lines[after], rows))
        (tokens, length, cut), *others = _equally_wide(written)
        for (other, size, cut_off), paths in zip(others, list(variants.values())[1:]):
            on_path = self._by_path([path in paths for path in range(len(seat))])
            tokens, length = jnp.where(on_path[:, None], other, tokens), jnp.where(on_path, size, length)
            cut = jnp.where(on_path, cut_off, cut)
        return tokens, length, cut

    def _continued(self, line: StageCall, added: Prompts) -> Prompts:
        """A continued history: its prompt, completion, the end of that turn if it was cut off, and the added text."""
        end = self.cast.chat.end_of_turn
        last = jnp.take_along_axis(line.tokens, jnp.maximum(line.length - 1, 0)[:, None], axis=1)[:, 0]
        unclosed = ((line.length == 0) | (last != end)).astype(jnp.int32)
        closing = jnp.full((self.episodes, 1), end, jnp.int32), unclosed
        *turn, cut = added
        pieces = [line.prompt, (line.tokens, line.length), closing, tuple(turn)]
        return *join(pieces, sum(values.shape[1] for values, _ in pieces)), cut

    def _tokenised(self, pieces: Sequence[Piece], *, by_task: bool) -> Prompts:
        """The tokens of a text in which every field is filled."""
        rows = len(self._tasks.id) if by_task else self.episodes
        filled = [self._filled(piece, rows) for piece in pieces]
        most = sum(values.shape[1] for (values, _), _ in filled)
        tokens = sum(bound for _, bound in filled)
        need = sum((length for (_, length), _ in filled), jnp.zeros((), jnp.int32)).max()
        texts = [text for text, _ in filled]
        of = lambda width: tokenise(self.cast.alphabet, *join(texts, width), tokens)
        # Most tokens are characters, so a quarter of `most` suffices unless many are long words.
        widths = (-(-most // 4), most) if rows * most > FEW else (most,)
        written, count = by_width(need, widths, of, self._seeds_axis)
        return written, jnp.minimum(count, tokens), jnp.maximum(count - tokens, 0)

    def _filled(self, piece: Piece, count: int) -> tuple[Rows, int]:
        """A filled piece: (codes and sizes, the most tokens of them)."""
        tasks = self._tasks
        if not isinstance(piece, Field):
            codes = jnp.frombuffer(piece.codes, jnp.uint8)
            return (jnp.broadcast_to(codes, (count, len(codes))), jnp.full(count, len(codes))), piece.tokens
        if piece.call is None:
            each = lambda x: jnp.repeat(x, count // len(tasks.id), axis=0)
            return (each(tasks.question), each(tasks.question_size)), tasks.question.shape[1]
        line = self.lines[piece.call]
        rows = line.codes
        if piece.part is not None:
            text = self.read([line])[0].parts[:, piece.part]
            rows = text, jnp.sum(text > 0, axis=1)
        return rows, line.tokens.shape[1]

    # -- reading

    def _read(self, lines: list[StageCall]) -> None:
        cue, count = lines[0].cue, len(lines)
        side_by_side = lambda xs: jnp.stack(xs, axis=1).reshape(self.episodes * count, *xs[0].shape[1:])
        codes, sizes = map(side_by_side, zip(*_equally_wide([line.codes for line in lines])))
        each = lambda x: jnp.repeat(jnp.asarray(x), self.cast.samples * count, axis=0)
        reader = form_of(cue.read, cue.role, self.family)
        read = reader(Text(codes, sizes), jax.tree.map(each, self._tasks.reference))
        made = side_by_side([line.length > 0 for line in lines])
        read = read._replace(readable=read.readable & made)
        for i, line in enumerate(lines):
            line.read = jax.tree.map(lambda x, i=i: x.reshape(self.episodes, count, *x.shape[1:])[:, i], read)


def checked(value: Any, kind: Any, shape: tuple[int, ...], what: str) -> jax.Array:
    """The value, which must be an array with one entry for each episode."""
    if getattr(value, "shape", None) != shape or not jnp.issubdtype(value.dtype, kind):
        actual = f"{value.dtype}{list(value.shape)}" if isinstance(value, jax.Array) else type(value).__name__
        raise NoArrayForm(f"{what} for each episode, [E], not {actual}")
    return value


def _equally_wide(rows: Sequence[tuple[jax.Array, ...]]) -> list[tuple[jax.Array, ...]]:
    """Rows or prompts, padded to the width of the widest."""
    width = max(values.shape[1] for values, *_ in rows)
    return [(jnp.pad(values, ((0, 0), (0, width - values.shape[1]))), *rest) for values, *rest in rows]
