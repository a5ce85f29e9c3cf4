"""Write the page about a run, or about every run below a directory, finished or still running.

python -m experiments.report --workdir=DIR     # DIR/report.html and DIR/report.png
python -m experiments.report --root=DIR        # one page over all runs below DIR, and each run's own; prints its tables
python -m experiments.report --root=results/study --out=DIR --findings=docs/findings.md     # of compact results
"""

import sys

from absl import flags

from marl_jax.commands import cli
from marl_jax.run_folder.folder import FolderError
from marl_jax.study.report.findings_text import write_findings
from marl_jax.study.report.html_page import write_overview, write_report
from marl_jax.study.results import read_study
from marl_jax.study.seed_tables import terminal_tables
from marl_jax.study.wording import plain
from marl_jax.terminal.tables import printable

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", None, "the folder of one run")
flags.DEFINE_string("root", None, "a directory that holds folders of runs")
flags.DEFINE_string("out", None, "another folder for the pages, if the runs are read-only")
flags.DEFINE_string("findings", None, "with --root of compact results: the Markdown page to write")


def main(_config: None, _: list[str]) -> None:
    if bool(FLAGS.workdir) == bool(FLAGS.root):
        raise FolderError("give either --workdir=DIR of one run, or --root=DIR of a directory of runs")
    if FLAGS.findings and not FLAGS.root:
        raise FolderError("--findings needs --root=DIR of compact results, see experiments.collect")
    if FLAGS.workdir:
        print(write_report(FLAGS.workdir, FLAGS.out))
        return
    study = read_study(FLAGS.root)
    if FLAGS.findings:
        write_findings(study, FLAGS.findings)
    place, study = write_overview(study, FLAGS.out)
    for text in study.unread:
        print(printable(text), file=sys.stderr)
    for table in terminal_tables(study.runs):
        print(f"{plain(table)}\n")
    print(place)


if __name__ == "__main__":
    cli.run(main, read=cli.no_config, prints=True)
