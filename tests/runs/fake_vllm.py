"""A stand-in for a vLLM server on loopback: its routes and JSON, its answers computed by forward passes.

Adapters are read as PEFT defines them, W + alpha/r B A on the matrices of the base's files, not as they were made.
Full weights are read from a directory; a tied one leaves the head as it was. A prompt is answered from the weights that
it was first asked of, under its name and salt: as cached prompts are. `faults` name what is wrong with it. As a program
it takes the command line of the real one and heeds its flags; with `FAKE_DIES_AFTER`, the first of its processes dies
after so many completions.
"""

import argparse
import contextlib
import dataclasses
import http.server
import json
import os
import socket
import sys
import threading
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

from marl_jax.models import forward, load_hf
from marl_jax.models.tokenizer import load_tokenizer
from marl_jax.models.weight_table import table

LENGTH = 128  # of every forward pass, so that one program is compiled


class FakeVllm(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, base, port=0, faults=(), longest=4096):
        super().__init__(("127.0.0.1", port), _Handler)
        self.faults, self.base, self.lock = {*faults}, str(base), threading.Lock()
        tied, self.params = load_hf(base, dtype="float32")
        self.params = {"lm_head": self.params["embed"].T, **self.params}
        self.config = dataclasses.replace(tied, tie_word_embeddings=False)
        self.tokenizer = load_tokenizer(base, self.config)
        self.adapters, self.loaded, self.asked, self.connections = {}, [], [], []
        self.longest, self.rank = longest, 512
        self.version, self.reloaded, self.cached = "default", [], {}
        self.dies_after = None  # so many completions
        self.hung = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __exit__(self, *args):
        self.hung.set()
        self.shutdown()
        for connection in self.connections:  # a server that has ended answers nobody who is still connected
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        super().__exit__(*args)

    def handle_error(self, request, client_address):
        pass  # a client that went away

    # -- routes: (status, JSON or text) ---------------------------------------------------------------------

    def answer(self, path, body):
        if "hangs" in self.faults and path != "/v1/models":
            self.hung.wait()
        routes = {
            "/health": lambda _: (200, ""),
            "/v1/models": self.models,
            "/tokenize": self.tokenize,
            "/v1/completions": self.complete,
            "/v1/load_lora_adapter": self.load,
            "/v1/unload_lora_adapter": self.unload,
            "/update_weight_version": self.name_weights,
            "/weight_info": self.weight_info,
            "/collective_rpc": self.reload,
        }
        with self.lock:
            return routes[path](body) if path in routes else (404, {"detail": "Not Found"})

    def models(self, _):
        longest = 40 if "short" in self.faults else self.longest
        card = {"id": self.base, "object": "model", "parent": None, "root": self.base}
        mine = [{**card, "max_model_len": longest}]
        return 200, {
            "object": "list",
            "data": [
                *mine,
                *({**card, "id": n, "parent": self.base, "max_model_len": None} for n in self.adapters),
            ],
        }

    def tokenize(self, body):
        tokens = self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
        tokens = tokens[::-1] if "tokenizer" in self.faults else tokens
        return 200, {"count": len(tokens), "max_model_len": 4096, "tokens": tokens}

    def load(self, body):
        if "no adapters" in self.faults:
            return 404, {"detail": "Not Found"}
        directory, name = Path(body["lora_path"]), body["lora_name"]
        if name in self.adapters:
            message = f"The lora adapter '{name}' has already been loaded."
            return 400, {"error": {"message": message, "type": "InvalidUserInput", "code": 400}}
        if not directory.is_dir():
            return _not_found(f"Loading lora {name} failed: No adapter found for {directory}")
        told, extra = (
            json.loads((directory / "adapter_config.json").read_text()),
            load_file(directory / "adapter_model.safetensors"),
        )
        if told["r"] > self.rank:
            return 400, {
                "error": {"message": f"LoRA rank {told['r']} is greater than max_lora_rank {self.rank}."}
            }
        self.adapters[name] = merged(self.params, self.config, extra, told["lora_alpha"] / told["r"])
        self.loaded.append(name)
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, body):
        if body["lora_name"] not in self.adapters:
            return _not_found(f"The lora adapter '{body['lora_name']}' cannot be found.")
        del self.adapters[body["lora_name"]]
        return 200, f"Success: LoRA adapter '{body['lora_name']}' removed successfully."

    def weight_info(self, _):
        if "no routes" in self.faults:
            return 404, {"detail": "Not Found"}
        return 200, {"weight_version": self.version}

    def name_weights(self, body):
        self.version = body["new_version"]
        return 200, {"success": True, "new_version": self.version}

    def reload(self, body):
        assert body["method"] == "reload_weights"
        path = Path(body["kwargs"]["weights_path"])
        if "reload" in self.faults or not path.is_dir():
            return 500, {"error": {"message": f"No weights in {path}", "type": "InternalServerError"}}
        _, fresh = load_hf(path, dtype="float32")
        if jax.tree.map(np.shape, self.params) != jax.tree.map(
            np.shape, {"lm_head": self.params["lm_head"], **fresh}
        ):
            return 500, {
                "error": {"message": "The size of a tensor must match", "type": "InternalServerError"}
            }
        self.params = {**self.params, **fresh}
        self.reloaded.append(path.name)
        return 200, {"results": [None]}

    def complete(self, body):
        self.asked.append(body)
        if self.dies_after is not None and len(self.asked) > self.dies_after:
            raise ConnectionAbortedError
        name = body["model"]
        if name not in (self.base, *self.adapters):
            return _not_found(f"The model `{name}` does not exist. Valid aliases: {self.base}.")
        whose = name, body.get("cache_salt"), tuple(body["prompt"])
        weights = self.cached.setdefault(whose, self.adapters.get(name, self.params))
        tokens, logprobs, reason = self.sample(weights, body)
        if "too few" in self.faults:
            tokens, logprobs, reason = tokens[:1], logprobs[:1], "abort"
        choice = {
            "index": 0,
            "text": self.tokenizer.decode(tokens),
            "finish_reason": reason,
            "stop_reason": tokens[-1] if reason == "stop" else None,
            "token_ids": tokens,
            "prompt_token_ids": body["prompt"],
            "logprobs": {
                "token_logprobs": logprobs,
                "tokens": [self.tokenizer.decode([token]) for token in tokens],
                "top_logprobs": [
                    {self.tokenizer.decode([token]): logprob} for token, logprob in zip(tokens, logprobs)
                ],
                "text_offset": list(range(len(tokens))),
            },
        }
        if "no log-probs" in self.faults:
            choice["logprobs"] = None
        if "no ids" in self.faults:
            choice["token_ids"] = None
        named = "someone-else" if "named" in self.faults else name
        return 200, {"id": "cmpl-1", "object": "text_completion", "model": named, "choices": [choice]}

    def sample(self, params, body):
        random, prompt, tokens, logprobs = np.random.default_rng(body["seed"]), body["prompt"], [], []
        while len(tokens) < body["max_tokens"]:
            row = np.zeros((1, LENGTH), np.int32)
            row[0, : len(prompt) + len(tokens)] = [*prompt, *tokens]
            raw = np.asarray(_forward(params, self.config, row)[0, len(prompt) + len(tokens) - 1], np.float64)
            raw = raw[::-1] * 5 if "weights" in self.faults else raw
            if len(tokens) < body["min_tokens"]:
                raw[body["stop_token_ids"]] = -np.inf
            logits = raw / (body["temperature"] or 1.0)
            if body["top_k"] > 0:
                logits = np.where(logits >= np.sort(logits)[-body["top_k"]], logits, -np.inf)
            chances = np.exp(logits - logits.max())
            chances /= chances.sum()
            greedy = body["temperature"] == 0
            token = int(chances.argmax() if greedy else random.choice(len(chances), p=chances))
            tokens.append(token)
            whole = np.exp(raw - raw.max())
            told = whole / whole.sum() if "raw" in self.faults else chances
            logprobs.append(float(np.log(told[token])))
            if token in body["stop_token_ids"]:
                return tokens, logprobs, "stop"
        return tokens, logprobs, "length"


def _not_found(message):
    return 404, {"error": {"message": message, "type": "NotFoundError", "param": None, "code": 404}}


_forward = jax.jit(forward, static_argnums=1)


def merged(params, config, extra, scale):
    """The base with an adapter in it, matrix by matrix, under the names of their files."""
    layers = dict(params["layers"])
    for module, entry in table(config)["layers"].items():
        stem = "base_model.model." + entry.hf.removesuffix("weight")
        if stem.format(layer=0) + "lora_A.weight" not in extra:
            continue
        products = [
            (extra[stem.format(layer=i) + "lora_B.weight"] @ extra[stem.format(layer=i) + "lora_A.weight"]).T
            for i in range(config.num_hidden_layers)
        ]
        layers[module] = layers[module] + scale * np.stack(products).reshape(layers[module].shape)
    return {**params, "layers": layers}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    dies = False  # with its process

    def setup(self):
        super().setup()
        self.server.connections.append(self.connection)

    def do_GET(self):
        self._do(None)

    def do_POST(self):
        self._do(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _do(self, body):
        try:
            status, found = self.server.answer(self.path, body)
        except ConnectionAbortedError:
            if self.dies:
                os._exit(1)
            self.close_connection = True
            return
        payload = (found if isinstance(found, str) else json.dumps(found)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)
        # As a server does that closes idle connections: without a word.
        self.close_connection = "closes" in self.server.faults

    def log_message(self, *args):
        pass


def main(argv):
    """Serve as the real one does with these flags; those that are needed have to be there."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-m", choices=["vllm.entrypoints.openai.api_server"], required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", choices=["127.0.0.1"], required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--hf-overrides", type=json.loads, default={})
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-loras", type=int, default=1)
    parser.add_argument(
        "--max-lora-rank", type=int, choices=[1, 8, 16, 32, 64, 128, 256, 320, 512], default=16
    )
    parser.add_argument("--logprobs-mode", default="raw_logprobs")
    parser.add_argument("--generation-config", choices=["vllm"], required=True)
    parser.add_argument("--seen", help="a file that the process ids are written to")
    asked = parser.parse_args(argv)
    if asked.hf_overrides != ({"head_dtype": "float32"} if asked.dtype == "bfloat16" else {}):
        parser.error(f"--hf-overrides is {asked.hf_overrides}: logits are those of the trainer in float32")
    faults = {
        "raw": asked.logprobs_mode == "processed_logprobs",
        "no adapters": asked.enable_lora and os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "True",
        "no routes": os.environ.get("VLLM_SERVER_DEV_MODE") == "1",
    }
    server = FakeVllm(
        asked.model, asked.port, [name for name, well in faults.items() if not well], asked.max_model_len
    )
    server.rank = asked.max_lora_rank
    seen = Path(asked.seen)
    first = not seen.exists()
    with seen.open("a") as file:
        file.write(f"{os.getpid()}\n")
    if (after := os.environ.get("FAKE_DIES_AFTER")) and first:
        server.dies_after = int(after)
        _Handler.dies = True
    print("ready", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
