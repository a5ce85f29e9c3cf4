"""The page about a run, or about every run below a directory; finished or still going on.

python -m experiments.report --workdir=DIR     # DIR/report.html and DIR/report.png
python -m experiments.report --root=DIR        # one page over all runs below DIR, and each run's own
"""

import sys

from absl import app, flags

from marl_jax.runs.files import DiskFull
from marl_jax.runs.folder import FolderError
from marl_jax.study.report import write_overview, write_report

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", None, "the folder of one run")
flags.DEFINE_string("root", None, "a directory that holds folders of runs")


def main(_: list[str]) -> None:
    if bool(FLAGS.workdir) == bool(FLAGS.root):
        sys.exit("give either --workdir=DIR of one run, or --root=DIR of a directory of runs")
    try:
        page = write_report(FLAGS.workdir) if FLAGS.workdir else write_overview(FLAGS.root)
    except (FolderError, DiskFull) as error:
        sys.exit(str(error))
    print(page)


if __name__ == "__main__":
    app.run(main)
