"""Read the documentation: a page, an example, or the docstrings of an object of the library.

marl-jax docs                  the pages, and the folder that they are in
marl-jax docs how-to           or        python -m experiments.docs how-to
marl-jax docs workflows.Call           every field of it
marl-jax docs examples                 the examples; marl-jax docs examples/own_loop.py > mine.py copies one
"""

import sys

from marl_jax.commands import cli


def main(_config: None, words: list[str]) -> None:
    from marl_jax.commands.listing import listing
    from marl_jax.commands.pages import EXAMPLES, page
    from marl_jax.packaged import packaged

    if not words:
        print(
            f"{listing('docs')}\n\nin {packaged('docs')}\nmarl-jax docs PAGE shows one; marl-jax docs examples lists "
            "programs to copy"
        )
    elif sys.stdout.isatty() and not words[0].startswith(f"{EXAMPLES}/"):
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(page(words[0])))
    else:
        print(page(words[0]).removesuffix("\n"))


if __name__ == "__main__":
    cli.run(main, words=1, read=cli.no_config, prints=True)
