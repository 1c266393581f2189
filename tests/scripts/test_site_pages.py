"""The site's pages: links of a checkout lead to pages of the site."""

from pathlib import PurePosixPath

import pytest
import site_pages


@pytest.mark.parametrize(
    ("place", "text", "wanted"),
    [
        ("README.md", "[d](docs/data.md)", "[d](data.md)"),
        ("README.md", "[f](docs/parallelism.md#fsdp)", "[f](parallelism.md#fsdp)"),
        ("README.md", '<img src="pictures/rl.png">', '<img src="pictures/rl.png">'),
        ("README.md", "[l](LICENSE)", "[l](source/LICENSE.md)"),
        ("docs/rl.md", "[d](data.md)", "[d](data.md)"),
        ("docs/rl.md", "![p](../pictures/rl.png)", "![p](pictures/rl.png)"),
        ("docs/rl.md", '<img src="../pictures/rl.png">', '<img src="../pictures/rl.png">'),
        ("docs/rl.md", "[home](../README.md)", "[home](index.md)"),
        (
            "docs/log/rl.md",
            "[loop](../../moetrain/rl/loop.py)",
            "[loop](../source/moetrain/rl/loop.py.md)",
        ),
        ("docs/rl.md", "[here](#rewards)", "[here](#rewards)"),
        ("docs/rl.md", "[there](https://arxiv.org/abs/1)", "[there](https://arxiv.org/abs/1)"),
        ("docs/rl.md", "`[code](nowhere.md)`", "`[code](nowhere.md)`"),
        ("docs/rl.md", "```sh\n[code](nowhere.md)\n```", "```sh\n[code](nowhere.md)\n```"),
    ],
)
def test_rewrite_gives_links_of_the_site(place, text, wanted):
    assert site_pages.rewrite(text, PurePosixPath(place))[0] == wanted


def test_rewrite_names_the_files_outside_docs():
    text = "[a](data.md) [b](../README.md) [c](../moetrain/rl/loop.py)"
    outside = site_pages.rewrite(text, PurePosixPath("docs/rl.md"))[1]
    assert outside == {PurePosixPath("README.md"), PurePosixPath("moetrain/rl/loop.py")}


def test_link_to_nothing_is_an_error():
    with pytest.raises(FileNotFoundError, match=r"gone\.py"):
        site_pages.rewrite("[x](../moetrain/gone.py)", PurePosixPath("docs/rl.md"))


def test_reference_has_every_public_name():
    import moetrain

    page = site_pages.api_page()
    for name in moetrain.__all__:
        assert f".{name}\n" in page


def test_references_in_docstrings_are_shown_as_names():
    class Page:
        class file:
            src_uri = site_pages.API

    html = "Build it with :meth:<code>load</code>, :class:<code>Layout &lt;a.b.Layout&gt;</code>."
    shown = site_pages.on_page_content(html, Page)
    assert shown == "Build it with <code>load</code>, <code>Layout</code>."
