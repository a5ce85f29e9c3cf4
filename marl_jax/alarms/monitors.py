"""The alarms: the number that each alarm watches, its limit, its meaning, and where to look.

    rows of metrics.jsonl, evaluations so far ──► History ──MONITORS──► {who: evidence}

Most monitors judge means over the last WINDOW steps, against the first step, which the base policies play: a collapse
may be over with the first update. Everything about a monitor is in its entry of `MONITORS`.
`marl_jax.alarms.watch` records since when its condition holds.
"""

import dataclasses
import math
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

WINDOW = 3  # but for jolts, numbers are means over so many steps: one odd step is no alarm
Limits = Mapping[str, float]
Findings = Iterator[tuple[str, dict[str, Any]]]  # (role or policy, evidence); the workflow as a whole is ""


class History:
    """What monitors read: the first and the last values of every key, and the last evaluation."""

    def __init__(self) -> None:
        self.step = 0
        self._phase: Any = None  # numbers are compared only within one phase
        self.evaluation: Mapping[str, Any] | None = None  # the last one
        self._first: dict[str, list[float]] = {}
        self._last: dict[str, deque[tuple[int, float]]] = {}

    def row(self, line: Mapping[str, Any]) -> None:
        """Add one line of `metrics.jsonl`."""
        self.step = line["step"]
        if line.get("phase") != self._phase:
            self._phase = line.get("phase")
            self._first.clear()
            self._last.clear()
        for key, value in line.items():
            if isinstance(value, int | float) and math.isfinite(value) and not key.startswith("time/"):
                self._last.setdefault(key, deque(maxlen=WINDOW)).append((self.step, float(value)))
                first = self._first.setdefault(key, [])
                if len(first) < WINDOW:
                    first.append(float(value))

    def names(self, pattern: str) -> list[str]:
        """Roles or policies: the pattern's group in every key that the pattern matches from start to end."""
        matches = (re.fullmatch(pattern, key) for key in self._last)
        return list(dict.fromkeys(match[1] for match in matches if match))

    def last(self, key: str) -> list[float]:
        """The values in the last WINDOW steps; empty if a step lacks one: a missing number raises no alarm."""
        values = [value for step, value in self._last.get(key, ()) if step > self.step - WINDOW]
        return values if len(values) == WINDOW else []

    def first(self, key: str) -> list[float]:
        """The first WINDOW values, or fewer if there are fewer yet."""
        return self._first.get(key, [])

    def ends(self, key: str) -> tuple[float, float] | None:
        """(the first value, the mean of the last values); None before there are enough."""
        last = self.last(key)
        return (self.first(key)[0], mean(last)) if last else None


@dataclasses.dataclass(frozen=True)
class Monitor:
    """One kind of alarm. `when` may name limits in braces, and `text` evidence; `{who}` is the role or policy."""

    name: str
    when: str  # the condition as text
    limits: Limits
    text: str  # the evidence as text
    means: str  # what the alarm means
    where: str  # where to look
    find: Callable[[History, Limits], Findings]

    @property
    def condition(self) -> str:
        """`when`, with its limits."""
        return self.when.format(WINDOW, **self.limits)


def mean(values: Collection[float]) -> float:
    """The mean, summed exactly: the order of the values does not change a bit of it."""
    return math.fsum(values) / len(values)


# ---------------------------------------------------------------- the conditions


def _at_least(value: float, limit: float) -> bool:
    """Whether a limit is reached, up to rounding: 0.3 - 0.1 is a rise of 0.2."""
    return value >= limit - 1e-9 * abs(limit)


def _at_most(value: float, limit: float) -> bool:
    return _at_least(-value, -limit)


def _one_choice(history: History, limits: Limits) -> Findings:
    """The share of the commonest choice of a role's calls, and their balanced accuracy."""
    for role in history.names("choice/([^/]+)/commonest"):
        calls, commonest = (history.last(f"choice/{role}/{name}") for name in ("calls", "commonest"))
        if not calls or not commonest or sum(calls) < limits["calls"]:
            continue
        share = float(np.average(commonest, weights=calls))
        balanced = history.last(f"choice/{role}/balanced_accuracy")
        if balanced and _at_most(mean(balanced), limits["balanced"]) and _at_least(share, limits["share"]):
            yield role, {"commonest": share, "calls": sum(calls), "balanced_accuracy": mean(balanced)}


def _calls(history: History, limits: Limits) -> Findings:
    ends = [history.ends(key) for key in ("calls", "episodes")]
    if all(ends) and all(ends[1]):  # type: ignore[arg-type]
        before, now = (calls / episodes for calls, episodes in zip(*ends))  # type: ignore[arg-type]
        if _fell_or_rose(before, now, limits):
            yield "", {"before": before, "now": now}


def _fell_or_rose(before: float, now: float, limits: Limits) -> bool:
    """Whether a number fell to a share of its first value or less (and below a floor), or rose to a multiple."""
    if before == 0:  # shares and multiples of 0 mean nothing
        return False
    low = _at_most(now, limits["low"] * before) and now <= limits.get("floor", math.inf)
    return low or _at_least(now, limits["high"] * before)


def _rose(before: float, now: float, limits: Limits) -> bool:
    """Whether a share rose."""
    return _at_least(now - before, limits["rise"])


def _of_roles(
    key: str, condition: Callable[[float, float, Limits], bool]
) -> Callable[[History, Limits], Findings]:
    """The roles whose first value and mean of the last values meet a condition."""

    def find(history: History, limits: Limits) -> Findings:
        for role in history.names(key.format("([^/]+)")):
            if ends := history.ends(key.format(role)):
                before, now = ends
                if condition(before, now, limits):
                    yield role, {"before": before, "now": now}

    return find


def _copying(history: History, limits: Limits) -> Findings:
    for role, evidence in _of_roles("copied/{}", _rose)(history, limits):
        length = history.last(f"role/{role}/length")
        long = length and mean(length) >= limits["tokens"]
        if long and _at_least(evidence["now"], limits["share"]):
            yield role, evidence


def _capture(history: History, limits: Limits) -> Findings:
    for policy in history.names("gradient/([^/]+)/share/.+"):
        shares = {}
        for role in history.names(f"gradient/{re.escape(policy)}/share/(.+)"):
            recent = history.last(f"gradient/{policy}/share/{role}")
            if recent and (share := mean(recent)) > 0:  # a role that does not train here competes with nobody
                shares[role] = share
        role = max(shares, key=lambda name: shares[name], default="")
        if len(shares) > 1 and _at_least(shares[role], limits["share"]):
            yield policy, {"role": role, "share": shares[role]}


def _nothing_to_learn(history: History, limits: Limits) -> Findings:
    # A frozen role has no entropy, and has nothing to learn by intent.
    learners = history.names("role/([^/]+)/entropy")
    for role in history.names("groups/([^/]+)/groups"):
        if learners and role not in learners:
            continue
        groups, *uninformative = (
            history.last(f"groups/{role}/{name}") for name in ("groups", "singletons", "zero_variance")
        )
        reward = history.last("reward")
        solved = reward and _at_least(mean(reward), limits["solved"])
        zeros = history.last(f"role/{role}/advantage_zero_share")  # a group of one may be worth its reward
        has_advantages = zeros and not _at_least(mean(zeros), limits["share"])
        if not groups or not all(uninformative) or not sum(groups) or solved or has_advantages:
            continue
        share = sum(map(sum, uninformative)) / sum(groups)
        if _at_least(share, limits["share"]):
            yield role, {"share": share, "groups": sum(groups)}


def _below_base(history: History, limits: Limits) -> Findings:
    difference = (history.evaluation or {}).get("difference") or {}
    if difference.get("high") is not None and difference["high"] < limits["points"]:
        yield "", {name: difference[name] for name in ("mean", "low", "high")}


def _paid_for_less(history: History, limits: Limits) -> Findings:
    fall = _change(history, "reward")
    if fall is None or not _at_most(fall[0], -limits["fall"]) or fall[1] > -limits["errors"]:
        return
    for role in history.names("reward/([^/]+)"):
        rise = _change(history, f"reward/{role}")
        if rise is not None and rise[1] >= limits["errors"]:
            yield role, {"reward_change": rise[0], "outcome_change": fall[0]}


def _change(history: History, key: str) -> tuple[float, float] | None:
    """(mean of the last values - mean of the first, the same in standard errors); None in the first steps."""
    first, last = history.first(key), history.last(key)
    # In a later phase the values may overlap; they are then never 4 standard errors apart.
    if not last or history.step < 2 * WINDOW:
        return None
    change = mean(last) - mean(first)
    error = math.sqrt((np.var(first, ddof=1) + np.var(last, ddof=1)) / WINDOW)
    return change, change / max(error, 1e-9)


def _sampler_apart(history: History, limits: Limits) -> Findings:
    for role in history.names("role/([^/]+)/chi2"):
        if (last := history.last(f"role/{role}/chi2")) and _at_least(mean(last), limits["chi2"]):
            yield role, {"chi2": mean(last)}


def _jolt(history: History, limits: Limits) -> Findings:
    """The last update against the one before it, and against the first; each for one unit of learning rate."""
    for policy in history.names("policy/([^/]+)/update_norm"):
        keys = [f"policy/{policy}/{name}" for name in ("update_norm", "learning_rate")]
        updates, rates = (history.last(key)[-2:] for key in keys)
        # A step without a gradient, or at a rate of 0, is no start.
        starts = [update / rate for update, rate in zip(*map(history.first, keys)) if update and rate]
        if not starts or not updates or not rates or not all(updates + rates):
            continue
        before, now = (update / rate for update, rate in zip(updates, rates))
        if _at_least(now, limits["times"] * before) and _at_least(now, limits["share"] * starts[0]):
            yield policy, {"times": now / before}


# ---------------------------------------------------------------- the table of all alarms

MONITORS = (
    Monitor(
        "one choice",
        "a judge or picker makes the same choice in {share:.0%} or more of at least {calls:.0f} calls, at a balanced "
        "accuracy of {balanced} or less",
        {"share": 0.9, "calls": 50, "balanced": 0.55},
        "{who} makes the same choice in {commonest:.0%} of {calls:,.0f} calls, at a balanced accuracy of "
        "{balanced_accuracy:.2f}",
        "It no longer looks at what it is shown; its accuracy is only how often that choice happens to be right.",
        "its texts in episodes/, and its reward: if only the outcome counts, a verdict that ends the episode pays "
        "whenever the draft is right; rewards.name=own_correctness or team_and_local rewards the verdict itself",
        _one_choice,
    ),
    Monitor(
        "calls",
        "calls per episode fell to {low:.0%} of the first step or less, or rose to {high:.0%} or more",
        {"low": 0.65, "high": 1.5},
        "calls per episode went from {before:.2f} to {now:.2f}",
        "The workflow no longer has the form that it began with: turns are skipped, or loops never end.",
        "who decides whether there is another call (a judge, a planner), and its choices",
        _calls,
    ),
    Monitor(
        "entropy",
        "the entropy of a role's tokens fell to {low:.0%} of the first step or less and below {floor} nats, or rose "
        "to {high:.0%} or more",
        {"low": 0.1, "floor": 0.002, "high": 2.0},
        "the entropy of {who} went from {before:.3f} to {now:.3f} nats",
        "Near zero, all samples of a problem are the same and teach nothing; if it rises, the role writes at random.",
        "learning rate, temperature, learner.loss.entropy_coef, and a KL coefficient to hold the policy",
        _of_roles("role/{}/entropy", _fell_or_rose),
    ),
    Monitor(
        "readability",
        "the share of a role's completions that cannot be read rose by {rise:.0%} of all completions or more",
        {"rise": 0.2},
        "unreadable completions of {who} went from {before:.0%} to {now:.0%}",
        "The role has lost the form of its answers; unreadable ones count as wrong, or as a default choice.",
        "its texts in episodes/; the learning rate; rewards.format_penalty",
        _of_roles("role/{}/unreadable_share", _rose),
    ),
    Monitor(
        "length",
        "the mean length of a role's completions fell to {low:.0%} of the first step or less, or rose to {high:.0%} "
        "or more",
        {"low": 0.5, "high": 2.0},
        "completions of {who} went from {before:.1f} to {now:.1f} tokens",
        "The role no longer writes in the form that it began with: it pads, rambles, or leaves its work out.",
        "its texts in episodes/; whether its reward depends on length; the loss's aggregation",
        _of_roles("role/{}/length", _fell_or_rose),
    ),
    Monitor(
        "truncation",
        "the share of a role's completions that are cut off rose by {rise:.0%} of all completions or more",
        {"rise": 0.2},
        "completions of {who} that are cut off went from {before:.0%} to {now:.0%}",
        "The role no longer comes to an end within sampling.max_new_tokens, so its answers are lost.",
        "its length; advantages.overlong or rewards.length_penalty; a larger max_new_tokens",
        _of_roles("role/{}/truncated_share", _rose),
    ),
    Monitor(
        "copying",
        "the share of a role's tokens that repeat 8 or more successive tokens of its prompt rose by {rise:.0%} of all "
        "tokens or more, to {share:.0%} or more, and its completions have {tokens:.0f} tokens or more",
        {"rise": 0.25, "share": 0.5, "tokens": 12},
        "tokens that {who} copies from its prompt went from {before:.0%} to {now:.0%}",
        "The role repeats its input instead of working on it.",
        "its texts in episodes/, and whether repeating what it read earns its reward",
        _copying,
    ),
    Monitor(
        "capture",
        "one role has {share:.0%} or more of the sum of the gradient norms of a policy's roles",
        {"share": 0.9},
        "{role} has {share:.0%} of the gradient mass of policy {who}",
        "The shared policy learns that role alone; the others drift with it.",
        "rewards and group sizes by role; advantages that are scaled (estimator=grpo), learner.interventions.mixing, "
        "or isolated policies",
        _capture,
    ),
    Monitor(
        "nothing to learn",
        "{share:.0%} or more of a role's groups have equal rewards or one member, and as many of its calls have "
        "advantage 0, while the mean outcome is below {solved:.0%}",
        {"share": 0.95, "solved": 0.95},
        "{share:.0%} of {groups:,.0f} groups of {who} teach nothing",
        "Calls that are compared with each other earn the same reward, so the role learns little but noise.",
        "entropy and temperature, the difficulty of the problems, whether the reward can tell answers apart, "
        "rollout.draws above 1",
        _nothing_to_learn,
    ),
    Monitor(
        "below base",
        "the interval of an evaluation's paired difference to the base lies below {points:.0f}",
        {"points": 0.0},
        "accuracy is {mean:+.1%} against the base ({low:+.1%} to {high:+.1%})",
        "The trained workflow is worse than the one that training began with.",
        "the other alarms, the learning rate, and the checkpoint of the best evaluation",
        _below_base,
    ),
    Monitor(
        "paid for less",
        "from the first {0} steps to the last {0}, a role's reward rose and the episodes' outcome fell, both by "
        "{errors:.0f} standard errors or more, the outcome by {fall} or more",
        {"errors": 4.0, "fall": 0.1},
        "the reward of {who} changed by {reward_change:+.3f} while the outcome changed by {outcome_change:+.3f}",
        "What the role is paid for is no longer what the workflow is for.",
        "credit/ROLE/NAME in metrics.jsonl: the component that rises; texts that earn it",
        _paid_for_less,
    ),
    Monitor(
        "sampler apart",
        "the chi-squared divergence of the trainer from the sampler is {chi2} or more for a role",
        {"chi2": 0.05},
        "trainer and sampler of {who} disagree: chi2 {chi2:.3g}",
        "Completions come from another distribution than the one that is trained, so the gradient is biased.",
        "engine.sampler, precision (policies.dtype), an engine of another library, and the warnings of the step",
        _sampler_apart,
    ),
    Monitor(
        "jolt",
        "the update of a policy, divided by the learning rate, is {times} times that of the step before or longer, and "
        "{share:.0%} of the first step's or longer",
        {"times": 1.8, "share": 0.25},
        "the update of {who} is {times:.1f} times as long as in the step before",
        "One call or token may have most of the gradient. Adam's next updates are long, too, and may undo what was "
        "learned.",
        "policy/NAME/grad_norm and role/ROLE/kl_max of the step; learner.optimiser.grad_clip or "
        "learner.interventions.role_clip near the usual norm; learner.loss.kl=k2 beside a KL coefficient",
        _jolt,
    ),
)
