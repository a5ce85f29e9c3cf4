"""Rollouts on a vLLM server, against a stand-in that speaks its wire format."""

import dataclasses
import http.client
import json
import os
import signal

import jax
import pytest
from fake_vllm import FakeVllm
from run_kit import records
from tiny_run import other_base, tiny_config
from vllm_kit import answers, check, config_of, in_full, moved, service_of, train

from marl_jax.commands.contenders import Evaluation
from marl_jax.commands.evaluate import evaluate
from marl_jax.config.run_config import (
    ConfigError,
    EngineConfig,
    VllmConfig,
)
from marl_jax.models.lora import merge
from marl_jax.policies import SamplingSettings
from marl_jax.rollouts.vllm import weights, wire
from marl_jax.rollouts.vllm.wire import Server
from marl_jax.rollouts.voices import EngineGone
from marl_jax.run_folder.checkpoints import steps
from marl_jax.run_folder.folder import FolderError
from marl_jax.runs.loading.parts import load_parts
from marl_jax.runs.loading.play import make_service, planned_engine
from marl_jax.sampling.requests import Request

pytestmark = pytest.mark.long


def test_each_policy_is_answered_by_its_own_adapter_and_an_update_reaches_it(base):
    with FakeVllm(base) as server:
        config = config_of(base, server.url)
        parts = load_parts(config)
        root, scale = parts.bases[str(base)], parts.lora_scale
        trees = moved(parts.start(0), 1)
        service = service_of(config, parts, trees)
        first = answers(service, trees, temperature=0.7)
        for policy, tree in trees.items():
            check(first[policy], merge(root, tree, scale), parts.model, 0.7)
        assert first == answers(service, trees, temperature=0.7)  # the seed is the request's own
        assert first["p0"] != first["p1"]

        after = moved(trees, 2)
        service.update(after, {"p0": 1, "p1": 1})
        for policy, found in answers(service, trees).items():
            check(found, merge(root, after[policy], scale), parts.model)
        assert service.versions == {"p0": 1, "p1": 1}
        # No name is used twice, and those of before are gone, so no cached prompt outlives its weights.
        assert len(set(server.loaded)) == 4 and list(server.adapters) == server.loaded[2:]


def test_full_weights_answer_from_the_update_on_whatever_prompts_are_cached(base):
    with FakeVllm(base) as server:
        config = in_full(config_of(base, server.url))
        parts = load_parts(config)
        trees = moved(parts.start(0), 1)  # of a tied model: its embedding, and so its head
        service = service_of(config, parts, trees)
        first = answers(service, trees, temperature=0.7)
        check(first["p0"], trees["p0"], parts.model, 0.7)
        assert first == answers(service, trees, temperature=0.7)
        for update in (2, 3):
            trees = moved(trees, update)
            service.update(trees, {"p0": update})
            check(answers(service, trees, temperature=0.7)["p0"], trees["p0"], parts.model, 0.7)
        assert service.versions == {"p0": 3} and len(set(server.reloaded)) == 3
        # The folder of the last is there, for a server that has to be started again, and no other.
        folder = weights_folder(service)
        assert [path.name for path in folder.iterdir()] == server.reloaded[-1:]
        service.close()


def weights_folder(service):
    return service.engines["p0"]._weights.folder


OF_SEVERAL = {
    "each in full": {"map": {"generator": "p0", "aggregator": "p1"}},
    "one in full, one frozen": {"map": {"generator": "p0", "aggregator": "p1"}, "frozen_roles": ("aggregator",)},
    "adapters on one base, in full on another": {
        "map": {"generator": "p0", "aggregator": "p1"}, "trains": {"p0": "lora"}, "bases": {"p1": "other"},
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", OF_SEVERAL)
def test_policies_that_cannot_share_a_server_have_one_each(base, kind):
    chosen, second = OF_SEVERAL[kind], base
    if "bases" in chosen:
        second = other_base(base)
        chosen = {**chosen, "bases": {"p1": second}}
    with FakeVllm(base) as one, FakeVllm(second) as two:
        chosen = in_full(tiny_config(base), lora_rank=4, **chosen).policies
        config = config_of(base, f"{one.url}, {two.url}", policies=chosen)
        parts = load_parts(config)
        trees = moved(parts.start(0), 1) | parts.frozen_trees()
        service = make_service(config, parts, trees, planned_engine(config, parts))
        for update in (2, 3):
            for policy, found in answers(service, trees).items():
                spec, model = parts.specs[policy], parts.models[parts.specs[policy].base]
                tree = trees[policy]
                whole = merge(parts.bases[spec.base], tree, parts.lora_scale) if spec.lora else tree
                check(found, whole, model)
            trees = moved(parts.start(0), update) | parts.frozen_trees()
            service.update(trees, dict.fromkeys(trees, update))
        assert service.versions == {"p0": 3, "p1": 3}
        service.close()


def test_weights_are_read_when_all_of_them_are_written(base, monkeypatch):
    with FakeVllm(base) as server:
        config = in_full(config_of(base, server.url))
        parts = load_parts(config)
        trees = parts.start(0)
        service = service_of(config, parts, trees)
        before, written = answers(service, trees), list(server.reloaded)

        def full(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(weights, "save_hf", full)
        with pytest.raises(EngineGone, match=r"no weights can be written to .*No space.*engine.vllm.folder"):
            service.update(moved(trees, 1), {"p0": 1})
        assert server.reloaded == written and answers(service, trees) == before


def test_a_server_that_has_other_weights_than_it_was_sent_ends_the_run(base):
    with FakeVllm(base) as server:
        config = in_full(config_of(base, server.url))
        parts = load_parts(config)
        mine, theirs = (service_of(config, parts, moved(parts.start(0), seed)) for seed in (1, 2))
        assert len(server.asked) == 4 + 2  # the second does not find the base there, and does not ask for it
        with pytest.raises(EngineGone, match=r"other weights than this run sent \('marl_jax_.*another run"):
            answers(mine, ["p0"])
        answers(theirs, ["p0"])
        server.version = "default"  # as it is where the server was started anew meanwhile
        with pytest.raises(EngineGone, match=r"sent \('default'\): it was restarted.*the same command"):
            answers(theirs, ["p0"])
    with FakeVllm(base, faults=["weights"]) as server:  # of another model, which nothing is sent to
        config = in_full(config_of(base, server.url))
        with pytest.raises(EngineGone, match=r"other weights than those of '.*nats a token off"):
            service_of(config, parts, parts.start(0))
        assert not server.reloaded


@pytest.mark.parametrize(
    ("of", "fault", "line"),
    [
        ("adapters", "raw", "another distribution"),
        ("adapters", "weights", "other weights than those of"),
        ("full weights", "weights", "other weights than those of"),
    ],
)
def test_a_server_that_is_started_anew_between_two_steps_is_checked_again(base, of, fault, line):
    with FakeVllm(base) as server:
        config, port = config_of(base, server.url), server.server_address[1]
        config = in_full(config) if of == "full weights" else config
        parts = load_parts(config)
        service = service_of(config, parts, parts.start(0))
        answers(service, ["p0"])
    with FakeVllm(base, port, faults=[fault]), pytest.raises(EngineGone, match=line):
        service.update(moved(parts.start(0), 1), {"p0": 1})


def test_adapters_are_not_served_over_the_full_weights_of_another_run(base):
    with FakeVllm(base) as server:
        config = config_of(base, server.url)
        in_full_config, parts = in_full(config), load_parts(config)
        mine = service_of(config, parts, parts.start(0))
        full_parts = load_parts(in_full_config)
        nearby = jax.tree.map(lambda leaf: 1.001 * leaf, full_parts.start(0))  # a few steps from the base
        service_of(in_full_config, full_parts, nearby)
        with pytest.raises(EngineGone, match=r"other weights than this run sent \('marl_jax_.*another run"):
            answers(mine, ["p0"])
        with pytest.raises(
            EngineGone, match=r"has the full weights of another run \('marl_jax_.*start it again"
        ):
            service_of(config, parts, parts.start(0))


def test_a_server_that_ends_with_a_stop_is_no_error_of_the_run(base, tmp_path, monkeypatch):
    """As where SLURM asks all processes of a job to end."""
    with FakeVllm(base) as server:
        complete, asked = Server.complete, []

        def interrupted(self, *args):
            asked.append(args)
            if len(asked) == 2 + 12 + 4:  # in the second step
                os.kill(os.getpid(), signal.SIGTERM)
                server.dies_after = 0
            return complete(self, *args)

        monkeypatch.setattr(Server, "complete", interrupted)
        reached, said = train(config_of(base, server.url), tmp_path / "run")
    assert reached == 1 and steps(tmp_path / "run" / "checkpoints") == [1] and "stopped after step 1" in said


def test_what_a_request_asks_for_is_what_is_sent(base):
    with FakeVllm(base) as server:
        config = config_of(base, server.url)
        parts = load_parts(config)
        service = service_of(config, parts, parts.start(0))
        (whole,) = answers(service, ["p0"], 1)["p0"]
        assert whole.finish_reason == "length" and len(whole.tokens) == 8
        (found,) = answers(service, ["p0"], 1, stop_tokens=whole.tokens[2:3])["p0"]
        at = whole.tokens.index(whole.tokens[2]) + 1
        assert found.finish_reason == "stop" and found.tokens == whole.tokens[:at]
        sent = server.asked[-1]
        assert sent["prompt"] == [5, 6, 7] and sent["model"] == server.loaded[0]
        assert sent["ignore_eos"] and sent["top_k"] == -1 and sent["repetition_penalty"] == 1
        with pytest.raises(ValueError, match="80"):
            service.engines["p0"].submit(Request((1,) * 73, (0,), 8, policy="p0"))


FAULTS = {
    "no adapters": "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True .*--enable-lora --max-loras 2 --max-lora-rank 8",
    "no routes": "refused /weight_info .*VLLM_SERVER_DEV_MODE=1 .*--max-model-len 80 --max-num-seqs 8 --logprobs",
    "reload": r"refused /collective_rpc \(500: No weights in .*engine.vllm.folder",
    "no ids": "return_token_ids",
    "no log-probs": "without a log-prob for every token",
    "too few": "after 1 of 16 tokens, with finish_reason 'abort'",
    "named": "answered as 'someone-else'",
    "weights": r"other weights than .* nats a token off: .*--model",
    "tokenizer": "another tokenizer",
    "raw": "--logprobs-mode processed_logprobs",
    "short": "takes 40 tokens .* 80: .*--max-model-len 80",
    "hangs": "has not answered within 0.3 s",
}


@pytest.mark.parametrize(("fault", "line"), FAULTS.items(), ids=list(FAULTS))
def test_a_server_that_does_not_fit_is_refused_in_one_line_that_says_what_to_do(base, fault, line):
    with FakeVllm(base, faults=[fault]) as server:
        config = config_of(base, server.url)
        config = in_full(config) if fault in ("no routes", "reload") else config
        if fault == "hangs":
            engine = dataclasses.replace(config.engine, vllm=VllmConfig(server.url, timeout=0.3))
            config = dataclasses.replace(config, engine=engine)
        parts = load_parts(config)
        with pytest.raises(EngineGone, match=line) as told:
            service_of(config, parts, parts.start(0))
        assert "\n" not in str(told.value) and server.url in str(told.value)


GOOD = {"token_ids": [3, 2, 1], "finish_reason": "length", "logprobs": {"token_logprobs": [-1.0, 0, 1e-7]}}
SCORES = (
    [5.0, -1, -1],
    [-9999.0, -1, -1],
    [-(10**400), -1, -1],
    [-1, float("nan"), -1],
    [-1, -1, float("-inf")],
)
BROKEN = (
    *((choices, "without token ids") for choices in (None, [], [None], ["x"], {"a": 1}, 7)),
    *(([GOOD | {"token_ids": ids}], "without token ids") for ids in (None, [1.0, 2, 3], [True, 2, 3])),
    *(([GOOD | {"token_ids": [1, 2, id]}], f"with token {str(id)[:9]}") for id in (-1, 10, 10**12)),
    *(([GOOD | {"logprobs": all}], "without a log-prob") for all in (None, [-1, -2, -3], {"token_logprobs": [-1] * 4})),
    *(([GOOD | {"logprobs": {"token_logprobs": all}}], "as the log-prob of a token") for all in SCORES),
    ([GOOD | {"token_ids": [3, 0, 1]}], "continued after the stop token, token 2 of 3"),
    ([GOOD | {"token_ids": [3, 2, 1, 4, 0], "finish_reason": "stop"}], "with 5 tokens; 0 to 3"),
)  # fmt: skip


@pytest.mark.parametrize(("choices", "line"), BROKEN)
def test_what_leaves_is_a_whole_answer_or_one_line(monkeypatch, choices, line):
    server, request = Server("http://there", 1.0, vocabulary=10), Request((5, 6), (0,), 3, stop_tokens=(0,))
    answer = lambda choices: (200, json.dumps({"model": "m", "choices": choices}))
    monkeypatch.setattr(server, "_exchange", lambda *asked: answer([GOOD]))
    assert server.complete(request, "m").logprobs == [-1.0, 0.0, 1e-7]
    stopped = GOOD | {"token_ids": [3, 2, 0]}  # "length", although the last token is a stop
    monkeypatch.setattr(server, "_exchange", lambda *asked: answer([stopped]))
    assert server.complete(request, "m").finish_reason == "stop"
    monkeypatch.setattr(server, "_exchange", lambda *asked: answer(choices))
    with pytest.raises(EngineGone, match=line):
        server.complete(request, "m")


def test_a_busy_server_is_asked_again_for_a_while(monkeypatch):
    server, now, answers = Server("http://there", 20.0), [0.0], [(503, "full"), (429, "slowly"), (200, "{}")]
    monkeypatch.setattr(wire.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(wire.time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(server, "_exchange", lambda *asked: answers.pop(0))
    assert server.ask("/v1/models") == {} and now == [1.5]
    monkeypatch.setattr(server, "_exchange", lambda *asked: (503, "full"))
    with pytest.raises(EngineGone, match=r"refused /v1/models \(503: full\)"):
        server.ask("/v1/models")
    assert 10 < now[0] - 1.5 < 20
    began, server = now[0], Server("http://there", 600.0)
    monkeypatch.setattr(server, "_exchange", lambda *asked: (503, "full"))
    with pytest.raises(EngineGone, match="503: full"):
        server.ask("/v1/models")
    assert 50 < now[0] - began < 60


def test_an_answer_that_is_no_http_is_one_line(monkeypatch):
    def garbled(*asked):
        raise http.client.BadStatusLine("220 mail.example\r\n")

    server = Server("http://there", 1.0)
    monkeypatch.setattr(server, "_exchange", garbled)
    with pytest.raises(EngineGone, match=r"\(BadStatusLine: 220 mail.example \): see its log$"):
        server.ask("/health")


def test_the_key_of_a_server_is_sent(monkeypatch):
    seen = {}

    class Connection:
        def request(self, method, path, body, headers):
            seen.update(headers)
            raise http.client.HTTPException

        def close(self):
            pass

    monkeypatch.setenv("VLLM_API_KEY", "secret\n")  # as read from a file
    server = Server("http://there", 1.0)
    server._open = Connection
    with pytest.raises(EngineGone):
        server.ask("/v1/models")
    assert seen == {"Authorization": "Bearer secret"}


@pytest.mark.parametrize("url", ["http://a..b:80", "http://[::1]", "http://" + "a" * 70])
def test_an_address_where_nobody_is_is_one_line(url):
    for timeout in (5.0, 1e10):  # the second is longer than a socket can wait
        with pytest.raises(EngineGone, match="cannot be reached"):
            Server(url, timeout).ask("/health")


def test_an_update_goes_on_with_a_server_started_anew_and_over_a_lost_connection(base, monkeypatch):
    with FakeVllm(base) as server:
        config = config_of(base, server.url + "/v1/")  # as clients of OpenAI's API name it
        parts = load_parts(config)
        service = service_of(config, parts, parts.start(0))
        server.adapters.clear()
        load, lost = server.load, iter([True])

        def lose(body):
            found = load(body)
            if next(lost, False):
                raise ConnectionAbortedError
            return found

        monkeypatch.setattr(server, "load", lose)
        trees = moved(parts.start(0), 1)
        service.update(trees, {"p0": 1, "p1": 1})
        assert next(lost, None) is None and len(server.adapters) == 2
        for policy, found in answers(service, trees).items():
            check(found, merge(parts.bases[str(base)], trees[policy], parts.lora_scale), parts.model)


def test_a_server_that_begins_to_hang_or_forgets_its_adapters_ends_the_wait(base):
    with FakeVllm(base) as server:
        config = config_of(base, server.url)
        config = dataclasses.replace(
            config, engine=dataclasses.replace(config.engine, vllm=VllmConfig(server.url, timeout=2.0))
        )
        parts = load_parts(config)
        service = service_of(config, parts, parts.start(0))
        server.adapters.clear()
        with pytest.raises(EngineGone, match=r"does not exist.*the same command loads"):
            answers(service, ["p0"], 1)
        service.engines["p0"].abandon()
        server.faults = {"hangs"}
        with pytest.raises(EngineGone, match="within 2 s"):
            answers(service, ["p0"], 1)


def test_connections_are_kept_and_one_that_the_server_closed_is_opened_again(base):
    with FakeVllm(base) as server:
        config = config_of(base, server.url)
        parts = load_parts(config)
        service = service_of(config, parts, parts.start(0))
        before = len(server.connections)
        whole = answers(service, ["p0"], 40)
        assert 1 <= len(server.connections) - before <= 8  # as many as are in flight
        server.faults = {"closes"}
        assert len(whole["p0"]) == len(answers(service, ["p0"], 40)["p0"]) == 40


def test_a_folder_that_cannot_be_written_is_named(base, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    held = weights.Weights({}, None, 1.0, "~")
    assert held.folder.parent == tmp_path
    with FakeVllm(base) as server:
        nowhere = VllmConfig(server.url, folder=str(tmp_path / "nowhere"))
        config = config_of(base, server.url, engine=EngineConfig("vllm", nowhere, max_prompt=72))
        parts = load_parts(config)
        with pytest.raises(EngineGone, match=r"engine.vllm.folder is .*nowhere"):
            service_of(config, parts, parts.start(0))


@pytest.mark.parametrize("of", ["adapters", "full weights"])
def test_a_run_survives_the_death_of_its_server(base, tmp_path, of):
    with FakeVllm(base) as server:
        config, port = config_of(base, server.url), server.server_address[1]
        config = in_full(config) if of == "full weights" else config
        server.dies_after = 18  # in the second step: a step has 12 calls, the checks 2
        with pytest.raises(EngineGone, match=r"cannot be reached .*the same command goes on after step 1"):
            train(config, tmp_path / "run")
    assert steps(tmp_path / "run" / "checkpoints") == [1]
    with pytest.raises(EngineGone, match=r"cannot be reached .*Refused"):
        train(config, tmp_path / "run")
    with FakeVllm(base, port if of == "adapters" else 0) as server:  # the same address, or another one
        config = config_of(base, server.url)
        config = in_full(config) if of == "full weights" else config
        reached, said = train(config, tmp_path / "run")
        assert reached == 2 and f"vLLM at {server.url}, 8 requests in flight" in said
        if of == "full weights":
            first, last = evaluate(tmp_path / "run", Evaluation(split="val"))
            assert (first["step"], last["step"]) == (0, 2)
    with FakeVllm(base) as elsewhere:
        lines = evaluate(tmp_path / "run", Evaluation(split="val", samples=2, url=elsewhere.url))
        assert [line["step"] for line in lines] == [0, 2] and elsewhere.asked
        with pytest.raises(ConfigError, match=r"engine.vllm.url is 'nowhere': give the server's address"):
            evaluate(tmp_path / "run", Evaluation(split="val", url="nowhere"))
    lines, _ = records(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2] and lines[1]["calls"] == 12
    # The sampler had the weights of step 1: its log-probs are those that the trainer computes.
    assert max(line["role/generator/gap_max"] for line in lines) < 1e-3
    assert lines[0]["policy/p0/grad_norm"] > 0


def test_a_policy_alone_is_answered_by_its_own_server_and_another_runs_policy_by_none(base, tmp_path):
    with FakeVllm(base) as one, FakeVllm(base) as two:
        config = config_of(base, f"{one.url},{two.url}", policies=tiny_config(base).policies, steps=1)
        train(config, tmp_path / "run")
        before = len(one.asked), len(two.asked)
        alone = Evaluation(split="val", mode="single_transfer", role="aggregator")
        assert [line["step"] for line in evaluate(tmp_path / "run", alone)] == [0, 1]
        assert len(one.asked) == before[0] and len(two.asked) > before[1]
        foreign = Evaluation(split="val", mode="generator_transfer", generator_from=tmp_path / "run")
        with pytest.raises(FolderError, match=r"generator_transfer plays .* a vLLM server reads folders"):
            evaluate(tmp_path / "run", foreign)


def test_what_vllm_cannot_do_is_refused_by_name(base):
    with pytest.raises(ConfigError) as told:
        config_of(
            base,
            "localhost:8000",
            policies=dataclasses.replace(tiny_config(base).policies, bases={"p1": "elsewhere"}),
            engine=EngineConfig("vllm", VllmConfig("localhost:8000"), sampler="math:sqrt", budget_bytes=1, steps=4),
            sampling=SamplingSettings(max_new_tokens=8, top_k=5, stop_strings=("x",)),
            road="compiled",
            seeds=2,
        )  # fmt: skip
    for line in (
        "engine.vllm.url is 'localhost:8000'",
        "engine.vllm.url has 1 and the run needs 2 servers, for p0, p1 (each policy that is trained in full",
        "engine.sampler is for", "engine.budget_bytes is for", "engine.steps is for", "role 'generator' truncates",
        "role 'aggregator' has stop_strings", "road is 'compiled'", "seeds is 2",
    ):  # fmt: skip
        assert any(line in problem for problem in told.value.problems), line
    with pytest.raises(ConfigError, match=r"engine.vllm is set and engine.kind is embedded"):
        config_of(base, "", engine=EngineConfig(vllm=VllmConfig("http://127.0.0.1:8000"), max_prompt=72))
