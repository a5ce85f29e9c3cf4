"""Read the documentation: a page, or what an object of the library says of itself, every field of it.

marl-jax docs                  what there is to read, and where it lies
marl-jax docs how-to           or        python -m experiments.docs how-to
marl-jax docs workflows.Call
"""

import sys

from marl_jax.commands import cli


def main(_config: None, words: list[str]) -> None:
    from marl_jax.commands.listing import listing
    from marl_jax.commands.pages import page
    from marl_jax.packaged import packaged

    if not words:
        print(f"{listing('docs')}\n\nin {packaged('docs')}; marl-jax docs PAGE shows one")
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(page(words[0])))
    else:
        print(page(words[0]))


if __name__ == "__main__":
    cli.run(main, words=1, read=cli.no_config)
