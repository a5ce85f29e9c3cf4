"""Write a small project: a workflow, a task, a reward, the cell that joins them, and their test.

marl-jax new DIR        or        python -m experiments.new DIR
"""

from marl_jax.commands import cli


def main(_config: None, words: list[str]) -> None:
    from marl_jax.commands.new import new_project

    print(new_project(words[0] if words else ""))


if __name__ == "__main__":
    cli.run(main, words=1, read=cli.no_config, prints=True)
