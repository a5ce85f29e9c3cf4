"""Export a policy of a run as a directory that transformers, PEFT, vLLM and others load.

python -m experiments.export --workdir=DIR --policy=p0 --out=OUT                       # merged, Hugging Face
python -m experiments.export --workdir=DIR --policy=p0 --out=OUT --format=peft         # of LoRA: the adapter
python -m experiments.export --workdir=DIR --policy=p0 --out=OUT --checkpoint=best --dtype=float32
python -m experiments.export --workdir=DIR --out=OUT --format=atif       # the recorded episodes, as trajectories
"""

from absl import flags

from marl_jax.commands import cli
from marl_jax.run_folder.folder import FolderError

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", "", "folder of the run")
flags.DEFINE_string("policy", "", "name of the policy to export")
flags.DEFINE_string("out", "", "directory to write")
flags.DEFINE_string("checkpoint", "latest", "latest, best, base or a step")
flags.DEFINE_enum(
    "format", "hf", ["hf", "peft", "atif"], "atif writes the recorded episodes instead of a policy"
)
flags.DEFINE_string(
    "dtype",
    None,
    "float32 or bfloat16; None: what was trained in float32 stays so, else as the base is stored",
)
flags.DEFINE_bool("overwrite", False, "replace the files of a model that is in the directory already")
cli.define_accept_changes()


def main(_config: None, _: list[str]) -> None:
    from marl_jax.commands.export import export
    from marl_jax.study.trajectories import export_trajectories

    if FLAGS.format == "atif":
        weights = ("policy", "checkpoint", "dtype", "overwrite")
        if given := [f"--{name}" for name in weights if FLAGS[name].present]:
            raise FolderError(
                f"--format=atif writes the recorded episodes of all policies: leave {', '.join(given)} out"
            )
        written = export_trajectories(FLAGS.workdir, FLAGS.out)
        print(f"{len(written)} trajectories: {FLAGS.out}")
        return
    given = {
        name: FLAGS[name].value for name in ("checkpoint", "format", "dtype", "accept_changes", "overwrite")
    }
    print(export(FLAGS.workdir, FLAGS.policy, FLAGS.out, **given))


if __name__ == "__main__":
    cli.run(main, read=cli.no_config, prints=True)
