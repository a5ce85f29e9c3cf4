"""The generator earns by its own drafts, the evaluator by the outcome; every draft after the first costs a little."""

PRICE = 0.1


def own_and_brief(graded):
    """One list for each graded episode, with the components of each of its calls."""
    return [[_earned(one, place) for place in range(len(one.calls))] for one in graded]


def _earned(one, place):
    call = one.calls[place]
    if call.role == "evaluator":
        return {"outcome": one.outcome}
    return {"own": one.answers[place], "price": -PRICE * call.slot}
