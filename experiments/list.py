"""List workflows, tasks, rewards, cells or fields of the configuration; with a word, only those that contain it.

marl-jax list                       what can be listed
marl-jax list workflows
marl-jax list cells voting          or        python -m experiments.list cells voting
marl-jax list fields learner.loss
"""

from marl_jax.commands import cli


def main(_config: None, words: list[str]) -> None:
    from marl_jax.commands.listing import listing

    print(listing(*words))


if __name__ == "__main__":
    cli.run(main, words=2, read=cli.no_config, prints=True)
