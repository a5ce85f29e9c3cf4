"""Code shared by all commands: --config is parsed from the command line, and a user's mistakes are printed in a line.

if __name__ == "__main__":
    cli.run(main)          # main(config or None, the words that absl left over)

Exit codes: 0, success; 1, failure; 2, refused, with what to correct; 130, interrupted by Ctrl-C.
"""

import contextlib
import functools
import logging as python_logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags, logging

from marl_jax import compile_cache, threads
from marl_jax.commands.console import early_close_allowed, make_output_safe
from marl_jax.config.run_config import ConfigError, RunConfig, from_argv, split_argv
from marl_jax.errors import RunError, UserError

__all__ = [
    "FAILED",
    "REFUSED",
    "define_accept_changes",
    "define_training",
    "no_config",
    "run",
    "train",
    "training_flags",
]

# Exit codes: the run ended by an error; the command or configuration must be corrected; Ctrl-C.
FAILED, REFUSED, INTERRUPTED = 1, 2, 130
# {phrase in a JAX error about a device: what the user can do about it}.
DEVICE_ERRORS = {
    "RESOURCE_EXHAUSTED": "the device is out of memory: other programs may hold some of it, and `plan` counts what a "
    "run needs; a run goes on from its newest checkpoint by the same command",
    "Unable to initialize backend": "JAX finds no device to use: another process may hold its memory (JAX takes most "
    "of a GPU's memory at once; XLA_PYTHON_CLIENT_PREALLOCATE=false makes it take what it needs); JAX_PLATFORMS=cpu "
    "runs on the processor",
}
flags.disclaim_key_flags()  # so that --helpshort of a command also shows the flags defined here


def define_accept_changes() -> None:
    """Define the flag that accepts changes of a run's inputs, for commands that open a run."""
    flags.DEFINE_bool(
        "accept_changes",
        False,
        "continue although the configuration, base, data, prompts or code have changed since the run began",
    )


def define_training() -> None:
    """Define the flags of commands that train; two are for processes that share a run, see docs/hosts.md."""
    define_accept_changes()
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, for a run with mesh.hosts above 1")
    flags.DEFINE_integer("process", None, "number of this process, from 0 on, in such a run")


def training_flags() -> dict[str, Any]:
    """The values of the training flags, for `train_and_report`."""
    return {name: flags.FLAGS[name].value for name in ("accept_changes", "coordinator", "process")}


def run(
    main: Callable[[Any, list[str]], int | None],
    words: int = 0,
    read: Callable[[Sequence[str]], tuple[Any, list[str]]] = from_argv,
    needs: str = "",
    prints: bool = False,
) -> None:
    """Call main under absl, with the configuration that `read` makes of --config and --config.*; None without them.

    At most `words` arguments may be no flags. `needs` is the form of --config if it is required. `prints` is for a
    command that only prints, or prints last: the reader of its output may close it early.
    """
    make_output_safe()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # packages are imported
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with early_close_allowed() if prints else contextlib.nullcontext():
            _run(main, words, read, needs)
    except KeyboardInterrupt:  # a training run handles it itself, see runs/stopping.py
        print("interrupted", file=sys.stderr, flush=True)
        if not threads.join_all(0):  # a normal exit would wait for programs that are being compiled
            sys.stdout.flush()
            os._exit(INTERRUPTED)
        sys.exit(INTERRUPTED)


def _run(
    main: Callable[[Any, list[str]], int | None],
    words: int,
    read: Callable[[Sequence[str]], tuple[Any, list[str]]],
    needs: str,
) -> None:
    # Deterministic kernels, set before a GPU is used, unless the user chose: a run that was killed and resumed has the
    # same bits as one that was not, and a run is evaluated as it was trained.
    if "xla_gpu_deterministic_ops" not in (xla_flags := os.environ.get("XLA_FLAGS", "")):
        os.environ["XLA_FLAGS"] = f"{xla_flags} --xla_gpu_deterministic_ops=true".strip()
    if "cache" not in flags.FLAGS:
        flags.DEFINE_bool(
            "cache", True, "keep compiled programs for the next start, see marl_jax/compile_cache.py"
        )
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # about missing PyTorch, at every start
    try:
        spec, texts, rest = split_argv(sys.argv)
        configured = spec is not None or texts
        config = read(sys.argv)[0] if configured else None
    except ValueError as error:  # a mistake in a config file, the name of a cell, or a field
        sys.exit(_refusal(error))
    way_out = "--helpshort tells what there is to set"
    if read is not no_config:
        way_out = f"fields of the configuration are set by --config.FIELD=VALUE, and {way_out}"
    parse = functools.partial(_parse, way_out=way_out)
    app.run(lambda left: _call(main, config, left[1:], words, needs, way_out), argv=rest, flags_parser=parse)


def no_config(argv: Sequence[str]) -> NoReturn:
    """The `read` of commands about existing runs: it refuses --config, because a run has its configuration."""
    spec, texts, _ = split_argv(argv)
    refused = [] if spec is None else ["--config"]
    meant = []
    for path, text in texts:
        refused.append(f"--config.{path}")
        if (flag := path.rpartition(".")[2]) in flags.FLAGS:
            meant.append(f"--{flag}" if text is None else f"--{flag}={text}")
    hint = f": did you mean {' '.join(meant)}?" if meant else "; --helpshort tells what there is to set"
    raise ValueError(f"the run has its own configuration: leave {', '.join(refused)} out{hint}")


def train(workdir: str, *defaults: str) -> None:
    """Train and report a configuration made of defaults and the command line, which takes precedence.

    A word on the command line replaces the default folder. `__main__:function` is a function of the running program:
    the configuration names it with the name under which the program can be imported.
    """
    define_training()
    main_module = sys.modules["__main__"]
    spec, file = main_module.__spec__, getattr(main_module, "__file__", None)
    name = spec.name if spec else Path(file or "").stem
    sys.argv[1:1] = [text.replace("=__main__:", f"={name}:") for text in defaults]

    def main(config: RunConfig, left: list[str]) -> None:
        from marl_jax.commands.train import train_and_report

        train_and_report(config, left[0] if left else workdir, **training_flags())

    run(main, words=1)


def _parse(argv: list[str], way_out: str) -> list[str]:
    try:
        with early_close_allowed():  # help is long, so its output may be closed early
            return flags.FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
        sys.exit(_refusal(f"{error}" if "Did you mean" in str(error) else f"{error}: {way_out}"))
    except flags.Error as error:
        sys.exit(_refusal(error))
    except SystemExit:  # raised by --help, which absl ends as a failure
        pass
    sys.exit(0)


class _PlainFormatter(python_logging.Formatter):
    """Writes warnings without absl's letter, date and place in the code."""

    def format(self, record: python_logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno < python_logging.WARNING else f"{record.levelname.lower()}: {text}"


def _call(
    main: Callable[..., int | None], config: Any, left: list[str], words: int, needs: str, way_out: str
) -> int | None:
    # Absl's default is INFO, with which messages of libraries would disturb the live view.
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    logging.get_absl_handler().setFormatter(_PlainFormatter())
    try:
        for word in left[words:]:
            if words and "=" not in word:
                raise UserError(f"'{word}' is one word too many: {words} at most")
            raise UserError(f"'{word}' is no flag: {way_out}")
        if config is None and needs:
            raise ConfigError([f"--config is missing: give --config={needs}"])
        if flags.FLAGS.cache:
            compile_cache.keep_programs()
        else:
            compile_cache.keep_nothing()
        return main(config, left)
    except UserError as error:
        return _refusal(error)
    except RunError as error:
        print(error, file=sys.stderr)
        return FAILED
    except RuntimeError as error:  # errors of JAX are among them
        if not (advice := next((text for mark, text in DEVICE_ERRORS.items() if mark in str(error)), "")):
            raise
        print(f"{str(error).splitlines()[0]}\n{advice}", file=sys.stderr)
        return FAILED
    except AssertionError as error:  # JAX_PLATFORMS=cuda, and JAX finds no NVIDIA GPU
        if not traceback.extract_tb(error.__traceback__)[-1].filename.endswith("xla_bridge.py"):
            raise
        print(
            "JAX_PLATFORMS names a device that this machine lacks: JAX_PLATFORMS=cpu runs on the processor",
            file=sys.stderr,
        )
        return FAILED


def _refusal(error: Exception | str) -> int:
    print(error, file=sys.stderr)
    return REFUSED
