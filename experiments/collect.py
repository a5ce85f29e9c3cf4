"""Write runs as compact JSON, one small file each, without weights and texts, to keep a study with its code.

python -m experiments.collect --root=DIR --out=results/study     # the finished runs below DIR
"""

import sys

from absl import flags

from marl_jax.commands import cli
from marl_jax.run_folder.folder import FolderError
from marl_jax.study.results import collect, read_result
from marl_jax.study.run_sentences import lost_evaluations_line

FLAGS = flags.FLAGS
flags.DEFINE_string("root", None, "a directory that holds folders of runs")
flags.DEFINE_string("out", None, "directory of the JSON files to write")
flags.DEFINE_bool("unfinished", False, "also collect runs that were stopped early")


def main(_config: None, _: list[str]) -> int:
    if not FLAGS.root or not FLAGS.out:
        raise FolderError("give --root=DIR of the runs and --out=DIR of the results")
    written, unread = collect(FLAGS.root, FLAGS.out, unfinished=FLAGS.unfinished)
    for path in written:
        try:
            for text in lost_evaluations_line(read_result(path)):
                print(f"{path}: {text}", file=sys.stderr)
        except FolderError as error:
            unread.append(str(error))
    for text in unread:
        print(text, file=sys.stderr)
    print(f"{len(written)} results in {FLAGS.out}")
    return 2 if unread else 0


if __name__ == "__main__":
    cli.run(main, read=cli.no_config, prints=True)
